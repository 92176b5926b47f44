//! Waiting of a thread for another: it spins for a while, then sleeps.

use super::Line;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a waiting thread spins between two looks at the clock.
const SPIN: Duration = Duration::from_micros(10);
/// Time that a waiting thread spins before it sleeps.
///
/// The thread never yields its core, because another program's thread could keep the core for milliseconds.
pub(super) const PATIENCE: Duration = Duration::from_micros(100);

/// Measures how many spins take [`SPIN`] on this machine.
pub(super) fn spins() -> usize {
    let begin = Instant::now();
    (0..200).for_each(|_| std::hint::spin_loop());
    let nanos = begin.elapsed().as_nanos().max(200) / 200;
    (SPIN.as_nanos() / nanos) as usize
}

/// Place where threads sleep until a condition becomes true.
#[derive(Default)]
pub(super) struct Signal {
    sleepers: Line<AtomicUsize>,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    /// Spins for about 100 microseconds. Returns whether `ready` became true.
    pub(super) fn soon(spins: usize, ready: impl Fn() -> bool) -> bool {
        let mut begin = None;
        loop {
            for _ in 0..spins {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if begin.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
                return ready();
            }
        }
    }

    /// Sleeps until `ready` is true. The thread that makes it true calls `wake` afterwards; both use sequentially
    /// consistent atomics.
    pub(super) fn sleep(&self, ready: impl Fn() -> bool) {
        // Either `wake` sees this count, or `ready` sees what came before `wake`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !ready() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the sleeping threads.
    pub(super) fn wake(&self) {
        if self.sleepers() > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    /// Returns the number of sleeping threads.
    pub(super) fn sleepers(&self) -> usize {
        self.sleepers.load(Ordering::SeqCst)
    }
}

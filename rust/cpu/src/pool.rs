//! The threads that passes run on: a call shares one piece of work after the other among them. Knows no models.
//!
//! A thread that waits spins for some microseconds, then yields its core, then sleeps: work between which little time
//! passes starts in 50 ns, and an idle pool costs nothing.

#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::memory::MAX_PARTS;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Microseconds that a waiting thread spins for.
const SPIN_MICROS: u128 = 10;
/// Times that it then yields its core before it sleeps; a yield takes 0.3 us where no other thread waits for the core.
const YIELDS: usize = 300;

/// A piece of work; its argument is the participant.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads that a pass is shared among, the caller's among them. Decoders may share one; calls wait for each other.
pub struct Pool {
    threads: usize,
    process: u32,
    team: Mutex<Team>,
}

impl Pool {
    /// A pool of `threads` participants: the caller and `threads - 1` threads of its own, which end when it is dropped.
    ///
    /// # Errors
    /// Where `threads` is 0 or above 256, or the system gives no more threads.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 || threads > MAX_PARTS {
            return Err(Error::invalid("threads", threads, format!("1 to {MAX_PARTS}")));
        }
        let mut team = Team { shared: Arc::new(Shared::new()), handles: Vec::new(), abandoned: false };
        for participant in 1..threads {
            let shared = Arc::clone(&team.shared);
            let thread = std::thread::Builder::new().name(format!("specrs-cpu-{participant}"));
            match thread.spawn(move || shared.serve(participant)) {
                Ok(handle) => team.handles.push(handle),
                Err(error) => {
                    let allowed = format!("at most {participant}, which the system gives: {error}");
                    return Err(Error::invalid("threads", threads, allowed));
                }
            }
        }
        Ok(Self { threads, process: std::process::id(), team: Mutex::new(team) })
    }

    /// Participants, the caller among them.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Ends its threads, once no call uses it; passes of decoders that share it fail from then on. A pool without threads of
    /// its own goes on.
    pub fn close(&self) {
        if std::process::id() == self.process {
            let mut team = self.team.lock().unwrap_or_else(PoisonError::into_inner);
            *team = Team { shared: Arc::new(Shared::new()), handles: Vec::new(), abandoned: false };
        }
    }

    /// Waits until no other call uses the pool.
    ///
    /// # Errors
    /// In a process that was forked off the pool's: its threads are not here. Where it is closed.
    pub(crate) fn enter(&self) -> Result<Session<'_>> {
        if self.threads > 1 && std::process::id() != self.process {
            return Err(Error::Forked { process: self.process, this: std::process::id() });
        }
        let team = self.team.lock().unwrap_or_else(PoisonError::into_inner);
        if self.threads > 1 && team.handles.is_empty() {
            return Err(Error::Closed);
        }
        Ok(Session { threads: self.threads, team })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // A forked child has the handles but not the threads, and one that held the lock is not here to give it back.
        if std::process::id() != self.process {
            self.team.get_mut().unwrap_or_else(PoisonError::into_inner).abandoned = true;
        }
    }
}

/// The only user of a pool for a while.
pub(crate) struct Session<'a> {
    threads: usize,
    team: MutexGuard<'a, Team>,
}

impl Session<'_> {
    /// Calls `work` once for each participant, and returns when all are done. The caller is participant 0.
    ///
    /// # Panics
    /// Where one of them panics, after all are done.
    pub(crate) fn run(&self, work: &Work<'_>) {
        if self.threads == 1 {
            return work(0);
        }
        let shared = &*self.team.shared;
        // SAFETY: only the lifetime changes. Threads use the reference between this call's epoch and their count in
        // `remaining`, for which `Finish` waits, also where `work` panics here.
        let work = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        // SAFETY: no thread reads it now: all have counted down since the last epoch, and the session is exclusive.
        unsafe { *shared.work.get() = Some(work) };
        shared.remaining.store(self.threads - 1, Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        shared.start.wake();
        let finish = Finish(shared);
        work(0);
        drop(finish);
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a thread of the pool panicked");
    }
}

/// Waits for all other participants when dropped.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.done.wait(self.0.spins, || self.0.remaining.load(Ordering::SeqCst) == 0);
    }
}

/// The pool's own threads.
struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    abandoned: bool,
}

impl Drop for Team {
    fn drop(&mut self) {
        if self.abandoned {
            return std::mem::take(&mut self.handles).into_iter().for_each(std::mem::forget);
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.shared.start.wake();
        for handle in self.handles.drain(..) {
            // A thread's panics are caught where they happen.
            let _ = handle.join();
        }
    }
}

/// A cache line of its own, so that what one thread writes does not slow what others read.
#[repr(align(128))]
struct Line<T>(T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// What the participants share.
struct Shared {
    /// Pieces of work so far; a new one starts when it changes.
    epoch: Line<AtomicU32>,
    /// Threads that have not finished the current one.
    remaining: Line<AtomicUsize>,
    work: UnsafeCell<Option<&'static Work<'static>>>,
    stop: AtomicBool,
    panicked: AtomicBool,
    start: Signal,
    done: Signal,
    spins: usize,
}

// SAFETY: `work` is written by the caller while no thread reads it, see `Session::run`; the rest is Sync.
unsafe impl Sync for Shared {}
// SAFETY: the reference in `work` is to something Sync.
unsafe impl Send for Shared {}

impl Shared {
    fn new() -> Self {
        let begin = Instant::now();
        (0..200).for_each(|_| std::hint::spin_loop());
        let nanos = begin.elapsed().as_nanos().max(200) / 200;
        Self {
            epoch: Line(AtomicU32::new(0)),
            remaining: Line(AtomicUsize::new(0)),
            work: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            start: Signal::default(),
            done: Signal::default(),
            spins: (SPIN_MICROS * 1000 / nanos) as usize,
        }
    }

    /// What a thread of the pool does.
    fn serve(&self, participant: usize) {
        let mut seen = 0_u32;
        loop {
            self.start.wait(self.spins, || self.epoch.load(Ordering::SeqCst) != seen);
            seen = seen.wrapping_add(1);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: written before the epoch changed, and not again before this thread counts down.
            let work = unsafe { *self.work.get() };
            if catch_unwind(AssertUnwindSafe(|| work.map(|work| work(participant)))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            if self.remaining.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.done.wake();
            }
        }
    }
}

/// Where threads sleep until something becomes true.
#[derive(Default)]
struct Signal {
    sleepers: Line<AtomicUsize>,
    lock: Mutex<()>,
    changed: Condvar,
}

impl<T: Default> Default for Line<T> {
    fn default() -> Self {
        Self(T::default())
    }
}

impl Signal {
    /// Returns once `ready`, which whoever makes it true follows by `wake`; both by sequentially consistent atomics.
    fn wait(&self, spins: usize, ready: impl Fn() -> bool) {
        for _ in 0..spins {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..YIELDS {
            if ready() {
                return;
            }
            std::thread::yield_now();
        }
        // Either `wake` sees this count, or `ready` sees what came before `wake`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !ready() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes whoever sleeps.
    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_participant_works_once_and_its_writes_are_seen() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            let session = pool.enter().unwrap();
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for i in 0..2000 {
                session.run(&|t| {
                    counts[t].fetch_add(1, Ordering::Relaxed);
                    // Some are late, so that others wait in every way there is.
                    if i % 500 == 250 && t == i % threads {
                        std::thread::sleep(std::time::Duration::from_millis(3));
                    }
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == i + 1), "{i}");
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                pool.enter().unwrap().run(&|t| assert!(t != bad, "as it should"));
            }));
            assert!(panicked.is_err());
            pool.enter().unwrap().run(&|_| {});
        }
    }

    #[test]
    fn callers_wait_for_each_other() {
        let pool = Pool::new(2).unwrap();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let session = pool.enter().unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        session.run(&|_| {});
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }
}

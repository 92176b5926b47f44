//! The threads that passes run on: a call shares one piece of work after the other among them. Knows no models.
//!
//! A thread that waits spins for some microseconds, then yields its core, then sleeps: work between which little time
//! passes starts in 50 ns, and an idle pool costs nothing.

#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::memory::MAX_PARTS;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Microseconds that a waiting thread spins for.
const SPIN_MICROS: u128 = 10;
/// Times that it then yields its core before it sleeps; a yield takes 0.3 us where no other thread waits for the core.
const YIELDS: usize = 300;
/// A session in which the caller slept as long as this, and for a third of its time, was late by whom it slept for.
const LATE: Duration = Duration::from_millis(1);
/// How long a thread that was late has no part in the work; twice as long each time that it soon is late again.
const SHORTEST_REST: Duration = Duration::from_millis(20);
const LONGEST_REST: Duration = Duration::from_secs(1);
/// The seat of a thread that has none.
const NO_SEAT: u64 = 0xFFFF;

/// A piece of work; its argument is the participant.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads that a pass is shared among, the caller's among them. Decoders may share one; calls wait for each other.
///
/// A thread whose core another process has keeps the others waiting for milliseconds. It then has no part in the work for
/// a while, from 20 ms to 1 s: results do not hang on who computes them.
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
        let rests = (1..threads).map(|_| Rest::default()).collect();
        let mut team = Team::default();
        (team.shared, team.rests) = (Arc::new(Shared::new(threads)), rests);
        for index in 0..threads - 1 {
            let shared = Arc::clone(&team.shared);
            let thread = std::thread::Builder::new().name(format!("specrs-cpu-{}", index + 1));
            match thread.spawn(move || shared.serve(index)) {
                Ok(handle) => team.handles.push(handle),
                Err(error) => {
                    let allowed = format!("at most {}, which the system gives: {error}", index + 1);
                    return Err(Error::invalid("threads", threads, allowed));
                }
            }
        }
        Ok(Self { threads, process: std::process::id(), team: Mutex::new(team) })
    }

    /// Participants at most, the caller among them.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Ends its threads, once no call uses it; passes of decoders that share it fail from then on. A pool without threads of
    /// its own goes on.
    pub fn close(&self) {
        if std::process::id() == self.process {
            let mut team = self.team.lock().unwrap_or_else(PoisonError::into_inner);
            *team = Team::default();
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
        let mut team = self.team.lock().unwrap_or_else(PoisonError::into_inner);
        if self.threads > 1 && team.handles.is_empty() {
            return Err(Error::Closed);
        }
        let entered = (self.threads > 1).then(Instant::now);
        let participants = entered.map_or(1, |now| team.take_seats(now));
        Ok(Session { participants, team, entered, slept: AtomicU64::new(0) })
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
    participants: usize,
    team: MutexGuard<'a, Team>,
    entered: Option<Instant>,
    /// Nanoseconds that the caller slept for others.
    slept: AtomicU64,
}

impl Session<'_> {
    /// Participants of this session, the caller among them: 1 to the pool's threads.
    pub(crate) fn participants(&self) -> usize {
        self.participants
    }

    /// Calls `work` once for each participant, and returns when all are done. The caller is participant 0.
    ///
    /// # Panics
    /// Where one of them panics, after all are done.
    pub(crate) fn run(&self, work: &Work<'_>) {
        if self.participants == 1 {
            return work(0);
        }
        let shared = &*self.team.shared;
        // SAFETY: only the lifetime changes. Threads use the reference between this call's epoch and their count in
        // `remaining`, for which `Finish` waits, also where `work` panics here.
        let work = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        // SAFETY: no thread reads it now: all with a seat have counted down since the last epoch, those without one do not
        // read it, and the session is exclusive.
        unsafe { *shared.work.get() = Some(work) };
        shared.remaining.store(self.participants - 1, Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        shared.start.wake();
        let finish = Finish(self);
        work(0);
        drop(finish);
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a thread of the pool panicked");
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let slept = Duration::from_nanos(*self.slept.get_mut());
        if let Some(entered) = self.entered.filter(|_| !slept.is_zero()) {
            let now = Instant::now();
            self.team.rest_the_late(now, slept >= LATE && slept * 3 >= now - entered);
        }
    }
}

/// Waits for all other participants when dropped.
struct Finish<'a, 'b>(&'a Session<'b>);

impl Drop for Finish<'_, '_> {
    fn drop(&mut self) {
        let shared = &*self.0.team.shared;
        let ready = || shared.remaining.load(Ordering::SeqCst) == 0;
        if Signal::soon(shared.spins, ready) {
            return;
        }
        let begin = Instant::now();
        let epoch = shared.epoch.load(Ordering::Relaxed);
        for thread in &shared.threads {
            let busy = thread.seat() & NO_SEAT != NO_SEAT && thread.finished.load(Ordering::Relaxed) != epoch;
            thread.late.fetch_or(busy, Ordering::Relaxed);
        }
        shared.done.sleep(ready);
        self.0.slept.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

/// When a thread may work again.
#[derive(Clone, Copy, Default)]
struct Rest {
    until: Option<Instant>,
    length: Duration,
}

/// The pool's own threads.
#[derive(Default)]
struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    rests: Vec<Rest>,
    abandoned: bool,
}

impl Team {
    /// Gives seats to the threads that do not rest, and returns how many participants there are.
    fn take_seats(&mut self, now: Instant) -> usize {
        let epoch = self.shared.epoch.load(Ordering::Relaxed);
        let (mut participants, mut back) = (1, false);
        for (thread, rest) in self.shared.threads.iter().zip(&self.rests) {
            let rests = rest.until.is_some_and(|until| now < until);
            let participant = if rests { NO_SEAT } else { participants as u64 };
            participants += usize::from(!rests);
            let before = thread.seat();
            if before & NO_SEAT != participant {
                thread.from.store(epoch, Ordering::Relaxed);
                thread.seat.store((before | NO_SEAT) + 1 + participant, Ordering::SeqCst);
                back |= before & NO_SEAT == NO_SEAT;
            }
        }
        if back {
            self.shared.back.wake();
        }
        participants
    }

    /// Sends threads that were slept for to rest, if there is `cause`.
    fn rest_the_late(&mut self, now: Instant, cause: bool) {
        for (thread, rest) in self.shared.threads.iter().zip(&mut self.rests) {
            if thread.late.swap(false, Ordering::Relaxed) && cause {
                let again = rest.until.is_some_and(|until| now < until + 10 * rest.length);
                rest.length = if again { (2 * rest.length).min(LONGEST_REST) } else { SHORTEST_REST };
                rest.until = Some(now + rest.length);
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if self.abandoned {
            return std::mem::take(&mut self.handles).into_iter().for_each(std::mem::forget);
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.shared.start.wake();
        self.shared.back.wake();
        for handle in self.handles.drain(..) {
            // A thread's panics are caught where they happen.
            let _ = handle.join();
        }
    }
}

/// A cache line of its own, so that what one thread writes does not slow what others read.
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// One of the pool's threads.
#[repr(align(128))]
struct Thread {
    /// Its number as participant in the low 16 bits, above them how often that has changed: written by the caller between
    /// pieces of work.
    seat: AtomicU64,
    /// The epoch behind which it has this seat.
    from: AtomicU32,
    /// The last epoch that it finished.
    finished: AtomicU32,
    /// Whether the caller slept for it in this session.
    late: AtomicBool,
}

impl Thread {
    fn seat(&self) -> u64 {
        self.seat.load(Ordering::SeqCst)
    }
}

/// What the participants share.
#[derive(Default)]
struct Shared {
    /// Pieces of work so far; a new one starts when it changes.
    epoch: Line<AtomicU32>,
    /// Threads that have not finished the current one.
    remaining: Line<AtomicUsize>,
    work: UnsafeCell<Option<&'static Work<'static>>>,
    threads: Vec<Thread>,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// A piece of work has started.
    start: Signal,
    /// It is done.
    done: Signal,
    /// A thread has a seat again.
    back: Signal,
    spins: usize,
}

// SAFETY: `work` is written by the caller while no thread reads it, see `Session::run`; the rest is Sync.
unsafe impl Sync for Shared {}
// SAFETY: the reference in `work` is to something Sync.
unsafe impl Send for Shared {}

impl Shared {
    fn new(participants: usize) -> Self {
        let begin = Instant::now();
        (0..200).for_each(|_| std::hint::spin_loop());
        let nanos = begin.elapsed().as_nanos().max(200) / 200;
        let thread = |seat| Thread {
            seat: AtomicU64::new(seat as u64),
            from: AtomicU32::new(0),
            finished: AtomicU32::new(0),
            late: AtomicBool::new(false),
        };
        let spins = (SPIN_MICROS * 1000 / nanos) as usize;
        Self { threads: (1..participants).map(thread).collect(), spins, ..Self::default() }
    }

    /// What a thread of the pool does.
    fn serve(&self, index: usize) {
        let me = &self.threads[index];
        let stop = || self.stop.load(Ordering::SeqCst);
        let (mut seat, mut seen) = (me.seat(), 0);
        loop {
            let changed = || self.epoch.load(Ordering::SeqCst) != seen;
            if !Signal::soon(self.spins, changed) {
                self.start.sleep(changed);
            }
            if me.seat() & NO_SEAT == NO_SEAT && !stop() {
                self.back.sleep(|| me.seat() & NO_SEAT != NO_SEAT || stop());
            }
            if stop() {
                return;
            }
            if me.seat() != seat {
                // From the next piece of work on, which may have started already.
                seat = me.seat();
                seen = me.from.load(Ordering::Relaxed);
                continue;
            }
            seen = self.epoch.load(Ordering::SeqCst);
            // SAFETY: written before the epoch changed, and not again before this thread, which has a seat, counts down.
            let work = unsafe { *self.work.get() };
            if catch_unwind(AssertUnwindSafe(|| work.map(|work| work((seat & NO_SEAT) as usize)))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            me.finished.store(seen, Ordering::Relaxed);
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

impl Signal {
    /// Waits for some microseconds, then lets others have the core for some more. Returns whether it is ready.
    fn soon(spins: usize, ready: impl Fn() -> bool) -> bool {
        for _ in 0..spins {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        for _ in 0..YIELDS {
            if ready() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    /// Returns once `ready`, which the thread that makes it true follows by `wake`; both by sequentially consistent atomics.
    fn sleep(&self, ready: impl Fn() -> bool) {
        // Either `wake` sees this count, or `ready` sees what came before `wake`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !ready() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the threads that sleep.
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

    /// Of repetitions: Miri is a thousand times slower, and sees a race without them.
    const FEWER: usize = if cfg!(miri) { 100 } else { 1 };

    #[test]
    fn every_participant_works_once_and_its_writes_are_seen() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            let session = pool.enter().unwrap();
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for i in 0..2000 / FEWER {
                session.run(&|t| {
                    counts[t].fetch_add(1, Ordering::Relaxed);
                    // Some are late, so that others wait in every way there is.
                    if i % (500 / FEWER) == 250 / FEWER && t == i % threads {
                        std::thread::sleep(std::time::Duration::from_millis(3));
                    }
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == i + 1), "{i}");
            }
        }
    }

    #[test]
    fn threads_that_were_late_rest_and_come_back() {
        let pool = Pool::new(4).unwrap();
        let work = |session: &Session<'_>| {
            let seen = AtomicUsize::new(0);
            session.run(&|t| {
                seen.fetch_add(1 << (8 * t), Ordering::Relaxed);
            });
            assert_eq!(seen.into_inner(), [1, 0x0101, 0x01_0101, 0x0101_0101][session.participants() - 1]);
        };
        let (mut rested, mut back) = (0, 0);
        for i in 0..if cfg!(miri) { 8 } else { 40 } {
            // Threads to rest are chosen, because lateness hangs on the machine.
            let late = i % 8;
            for (index, thread) in pool.enter().unwrap().team.shared.threads.iter().enumerate() {
                thread.late.store(late >> index & 1 == 1, Ordering::Relaxed);
            }
            let now = Instant::now();
            pool.team.lock().unwrap().rest_the_late(now, true);
            for _ in 0..300 / FEWER {
                let session = pool.enter().unwrap();
                rested += usize::from(session.participants() < 4);
                back += usize::from(session.participants() == 4);
                (0..3).for_each(|_| work(&session));
            }
            let rests = &mut pool.team.lock().unwrap().rests;
            for rest in rests {
                let length = if i % 3 == 0 { SHORTEST_REST } else { rest.length };
                *rest = Rest { until: None, length };
            }
        }
        assert!(rested > 0 && back > 0, "{rested} {back}");
    }

    #[test]
    fn a_thread_that_the_caller_sleeps_for_is_late() {
        let pool = Pool::new(2).unwrap();
        let session = pool.enter().unwrap();
        let shared = &*session.team.shared;
        session.run(&|t| {
            while t == 1 && shared.done.sleepers.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
        });
        assert!(shared.threads[0].late.load(Ordering::Relaxed));
        assert!(session.slept.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn rests_grow_while_a_thread_stays_late_and_need_a_cause() {
        let pool = Pool::new(2).unwrap();
        let mut team = pool.team.lock().unwrap();
        let mut now = Instant::now();
        for expected in [20, 40, 80, 160, 320, 640, 1000, 1000] {
            team.shared.threads[0].late.store(true, Ordering::Relaxed);
            team.rest_the_late(now, true);
            assert_eq!(team.rests[0].length, Duration::from_millis(expected));
            assert_eq!(team.take_seats(now), 1);
            now += Duration::from_millis(expected);
            assert_eq!(team.take_seats(now), 2);
            team.shared.threads[0].late.store(true, Ordering::Relaxed);
            team.rest_the_late(now, false);
            assert_eq!(team.take_seats(now), 2);
        }
        now += Duration::from_secs(11);
        team.shared.threads[0].late.store(true, Ordering::Relaxed);
        team.rest_the_late(now, true);
        assert_eq!(team.rests[0].length, SHORTEST_REST);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            // A thread that the machine made late before would not take part.
            pool.team.lock().unwrap_or_else(PoisonError::into_inner).rests.fill(Rest::default());
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
                    for _ in 0..200 / FEWER {
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

//! Pool of threads that passes run on. A call runs one job after another, and threads claim the job's pieces. Knows no
//! models. A participant is a thread that takes part in a call: number 0 is the caller's, the others are the pool's.
//!
//! A thread that is not running delays other threads only while it holds a piece: the others do its remaining pieces. A
//! job ends when the threads that entered it have left, and a thread that comes late finds the job closed.

#![allow(unsafe_code)]

mod pieces;
mod signal;
#[cfg(test)]
mod tests;

pub(crate) use pieces::Pieces;

use crate::error::{Error, Result};
use pieces::Unclaimed;
use signal::Signal;
use specrs_cpu_kernels::MAX_PARTS;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time that the caller must have waited in a session before a thread counts as late. The wait must also be at least
/// half of the time that the thread has saved.
///
/// It is half and not all of it, because threads share the memory's bandwidth: without the thread, the caller itself
/// would have been faster.
const LATE: Duration = Duration::from_millis(1);
/// Time that a late thread does no work at first. It is multiplied by four each time that the thread is soon late
/// again.
const SHORTEST_REST: Duration = Duration::from_millis(20);
/// Maximum time that a late thread does no work.
const LONGEST_REST: Duration = Duration::from_secs(1);
/// Value of a seat for a thread that takes no part in the session.
const NO_SEAT: u64 = u64::MAX;

/// Function that does a job. Its arguments are the participant and the pieces that it claims, at least one.
type Work<'a> = dyn Fn(usize, Pieces<'_>) + Sync + 'a;

/// Threads that a pass is shared among, including the caller's. Decoders may share a pool; calls wait for each other.
///
/// A thread that loses its core to another process while it holds a piece keeps the others waiting for milliseconds. It
/// then does no work for a while, from 20 ms to 1 s. Results do not depend on the thread that computes them.
pub struct Pool {
    threads: usize,
    process: u32,
    team: Mutex<Team>,
}

impl Pool {
    /// Makes a pool of `threads` threads: the caller's and `threads - 1` of its own, which end when it is dropped.
    ///
    /// # Errors
    /// If `threads` is 0 or above 256, or the system gives no more threads.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 || threads > MAX_PARTS {
            return Err(Error::invalid("threads", threads, format!("from 1 to {MAX_PARTS}")));
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
                    let allowed = format!("at most {}, because the system starts no more ({error})", index + 1);
                    return Err(Error::invalid("threads", threads, allowed));
                }
            }
        }
        Ok(Self { threads, process: std::process::id(), team: Mutex::new(team) })
    }

    /// Returns the maximum number of threads that a call runs on, including the caller's.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Ends the pool's threads, once no call uses them; passes of decoders that share the pool then fail. A pool
    /// without threads of its own goes on.
    pub fn close(&self) {
        if std::process::id() == self.process {
            let mut team = self.team.lock().unwrap_or_else(PoisonError::into_inner);
            *team = Team::default();
        }
    }

    /// Waits until no other call uses the pool, and returns its exclusive use.
    ///
    /// # Errors
    /// If the process was forked off the pool's, because its threads exist only there, or if the pool is closed.
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
        Ok(Session::new(participants, team, entered))
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

/// Exclusive use of a pool by one call.
pub(crate) struct Session<'a> {
    participants: usize,
    team: MutexGuard<'a, Team>,
    entered: Option<Instant>,
    /// Nanoseconds that the caller waited for other participants that held a piece.
    waited: AtomicU64,
    /// Number of pieces that the caller did.
    own: AtomicU64,
    /// Number of pieces of all jobs.
    all: AtomicU64,
}

impl<'a> Session<'a> {
    fn new(participants: usize, team: MutexGuard<'a, Team>, entered: Option<Instant>) -> Self {
        let [waited, own, all] = [const { AtomicU64::new(0) }; 3];
        Self { participants, team, entered, waited, own, all }
    }

    /// Returns the number of participants in this session, including the caller: 1 to the pool's threads.
    pub(crate) fn participants(&self) -> usize {
        self.participants
    }

    /// Runs a job: the participants do each of its pieces once, and the call returns when all are done. Participant t
    /// begins with the pieces `first[t]..first[t + 1]` and continues with pieces of others.
    ///
    /// Calls `work` at most once per participant, with at least one piece. The caller is participant 0.
    ///
    /// # Panics
    /// If a participant panics, after all have left the job.
    pub(crate) fn run(&self, first: &[usize], work: &Work<'_>) {
        assert!(first.len() == self.participants + 1, "bounds of {} participants' pieces", self.participants);
        if self.participants == 1 {
            if first[0] < first[1] {
                work(0, Pieces::all(first[0]..first[1]));
            }
            return;
        }
        let shared = &*self.team.shared;
        // SAFETY: only the lifetime changes. Threads use the reference while they are inside the job, and `Finish` waits
        // until none is, also where `work` panics here.
        let work = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        // SAFETY: no thread reads it now. A thread reads it inside a job; the last one is closed, so none enters, all have
        // left, and the session is exclusive.
        unsafe { *shared.work.get() = Some((work, self.participants)) };
        shared.unclaimed.reset(first);
        shared.panicked.store(false, Ordering::Relaxed);
        shared.job.open();
        shared.start.wake();
        let (finish, own) = (Finish(self), Cell::new(0));
        if let Some(pieces) = Pieces::claimed(&shared.unclaimed, 0, self.participants, &own) {
            work(0, pieces);
        }
        self.own.fetch_add(own.get() as u64, Ordering::Relaxed);
        self.all.fetch_add((first[self.participants] - first[0]) as u64, Ordering::Relaxed);
        drop(finish);
        assert!(!shared.panicked.load(Ordering::Relaxed), "a thread of the pool panicked");
    }

    /// Removes the seats of the `busy` threads, for which the caller has waited, if the waits cost more than the
    /// threads save.
    ///
    /// The time that a thread saves is the caller's working time for as many pieces as one of the others did.
    fn note_wait(&self, waited: Duration, busy: impl Iterator<Item = usize>) {
        let nanos = waited.as_nanos() as u64;
        let total = Duration::from_nanos(self.waited.fetch_add(nanos, Ordering::Relaxed) + nanos);
        let [own, all] = [&self.own, &self.all].map(|count| count.load(Ordering::Relaxed) as f64);
        let worked = self.entered.map_or(Duration::ZERO, |entered| entered.elapsed().saturating_sub(total));
        let saved = worked.as_secs_f64() * (all - own) / own.max(1.0) / (self.participants - 1) as f64;
        if total >= LATE && 2.0 * total.as_secs_f64() >= saved {
            for index in busy {
                let thread = &self.team.shared.threads[index];
                thread.late.store(true, Ordering::Relaxed);
                thread.seat.store(NO_SEAT, Ordering::SeqCst);
            }
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if *self.waited.get_mut() > 0 {
            self.team.rest_the_late(Instant::now());
        }
    }
}

/// Guard that closes the job when dropped, and waits until all threads have left it.
struct Finish<'a, 'b>(&'a Session<'b>);

impl Drop for Finish<'_, '_> {
    fn drop(&mut self) {
        let shared = &*self.0.team.shared;
        let empty = || shared.job.is_empty();
        if shared.job.close() || Signal::soon(shared.spins, empty) {
            return;
        }
        let (begin, epoch) = (Instant::now(), shared.job.epoch());
        let is_busy = |index: &usize| shared.threads[*index].inside.load(Ordering::Relaxed) == epoch;
        let busy: Vec<usize> = (0..shared.threads.len()).filter(is_busy).collect();
        shared.done.sleep(empty);
        self.0.note_wait(signal::PATIENCE + begin.elapsed(), busy.into_iter());
    }
}

/// Pause of a thread that was late: its end and its length.
#[derive(Clone, Copy, Default)]
struct Rest {
    until: Option<Instant>,
    length: Duration,
}

/// Threads of the pool, with their pauses.
#[derive(Default)]
struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    rests: Vec<Rest>,
    abandoned: bool,
}

impl Team {
    /// Gives seats to the threads that do not pause, and returns the number of participants.
    fn take_seats(&mut self, now: Instant) -> usize {
        let (mut participants, mut back) = (1, false);
        for (thread, rest) in self.shared.threads.iter().zip(&self.rests) {
            let rests = rest.until.is_some_and(|until| now < until);
            let seat = if rests { NO_SEAT } else { participants as u64 };
            participants += usize::from(!rests);
            let before = thread.seat.swap(seat, Ordering::SeqCst);
            back |= before == NO_SEAT && !rests;
        }
        if back {
            self.shared.back.wake();
        }
        participants
    }

    /// Begins or extends the pauses of the threads that were late.
    fn rest_the_late(&mut self, now: Instant) {
        for (thread, rest) in self.shared.threads.iter().zip(&mut self.rests) {
            if thread.late.swap(false, Ordering::Relaxed) {
                let again = rest.until.is_some_and(|until| now < until + 10 * rest.length);
                rest.length = if again { (4 * rest.length).min(LONGEST_REST) } else { SHORTEST_REST };
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
        self.shared.start.wake();
        self.shared.back.wake();
        for handle in self.handles.drain(..) {
            // A thread's panics are caught where they happen.
            let _ = handle.join();
        }
    }
}

/// Value in a cache line of its own, so that writes of one thread do not slow reads of others.
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// State of one of the pool's threads.
#[repr(align(128))]
struct Thread {
    /// Number of the thread as participant, or [`NO_SEAT`]. Written by the caller between jobs.
    seat: AtomicU64,
    /// Epoch of the job that the thread is inside of or about to enter; 0 for none.
    inside: AtomicU64,
    /// Whether the thread pauses after this session.
    late: AtomicBool,
}

/// State of the open or last job: its epoch, whether threads may enter it, and the number of threads inside.
#[derive(Default)]
struct Job(AtomicU64);

impl Job {
    const INSIDE: u64 = 0xFFFF;
    const OPEN: u64 = 0x1_0000;
    const EPOCH: u64 = 0x2_0000;

    /// Begins the next job. The last job is closed and empty, so no other thread writes the word.
    fn open(&self) {
        let epoch = self.epoch() + 1;
        self.0.store((epoch * Self::EPOCH) | Self::OPEN, Ordering::SeqCst);
    }

    /// Closes the job for threads that have not entered. Returns whether none is inside.
    fn close(&self) -> bool {
        self.0.fetch_and(!Self::OPEN, Ordering::SeqCst) & Self::INSIDE == 0
    }

    fn is_empty(&self) -> bool {
        self.0.load(Ordering::SeqCst) & Self::INSIDE == 0
    }

    /// Returns the epoch of the job; the first is 1.
    fn epoch(&self) -> u64 {
        self.0.load(Ordering::SeqCst) / Self::EPOCH
    }

    /// Returns whether there is a job that may be entered and has another epoch than `seen`.
    fn is_new(&self, seen: u64) -> bool {
        let word = self.0.load(Ordering::SeqCst);
        word & Self::OPEN != 0 && word / Self::EPOCH != seen
    }

    /// Enters the job of this epoch. Returns false if it is closed.
    fn enter(&self, epoch: u64) -> bool {
        let enter = |word| (word & Self::OPEN != 0 && word / Self::EPOCH == epoch).then_some(word + 1);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok()
    }

    /// Leaves the job. Returns whether it is closed and no thread is inside any more.
    fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::SeqCst) & (Self::OPEN | Self::INSIDE) == 1
    }
}

/// State that the participants share.
#[derive(Default)]
struct Shared {
    job: Line<Job>,
    /// Work and number of participants of the job.
    work: UnsafeCell<Option<(&'static Work<'static>, usize)>>,
    unclaimed: Unclaimed,
    threads: Vec<Thread>,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// Signal that a job is open.
    start: Signal,
    /// Signal that the job is closed and empty.
    done: Signal,
    /// Signal that a thread takes part again after a pause.
    back: Signal,
    spins: usize,
}

// SAFETY: `work` is written by the caller while no thread reads it, see `Session::run`; the rest is Sync.
unsafe impl Sync for Shared {}
// SAFETY: the reference in `work` is to something Sync.
unsafe impl Send for Shared {}

impl Shared {
    fn new(participants: usize) -> Self {
        let thread = |seat| Thread {
            seat: AtomicU64::new(seat as u64),
            inside: AtomicU64::new(0),
            late: AtomicBool::new(false),
        };
        Self {
            threads: (1..participants).map(thread).collect(),
            unclaimed: Unclaimed::new(participants),
            spins: signal::spins(),
            ..Self::default()
        }
    }

    /// Runs the loop of a thread of the pool.
    fn serve(&self, index: usize) {
        let me = &self.threads[index];
        let stop = || self.stop.load(Ordering::SeqCst);
        let has_seat = || me.seat.load(Ordering::SeqCst) != NO_SEAT;
        let mut seen = 0;
        loop {
            let begins = || self.job.is_new(seen) || stop();
            if !Signal::soon(self.spins, begins) {
                self.start.sleep(begins);
            }
            if stop() {
                return;
            }
            if !has_seat() {
                self.back.sleep(|| has_seat() || stop());
                continue;
            }
            seen = self.job.epoch();
            self.take_part(me, seen);
        }
    }

    /// Takes part in the job of this epoch, unless it is closed.
    fn take_part(&self, me: &Thread, epoch: u64) {
        me.inside.store(epoch, Ordering::Relaxed);
        if self.job.enter(epoch) {
            let seat = me.seat.load(Ordering::SeqCst);
            // SAFETY: written before the job was open, and not again before this thread has left it.
            let work = unsafe { *self.work.get() };
            if let Some((work, participants)) = work.filter(|_| seat != NO_SEAT) {
                let count = Cell::new(0);
                let pieces = Pieces::claimed(&self.unclaimed, seat as usize, participants, &count);
                let take_part = || pieces.map(|pieces| work(seat as usize, pieces));
                if catch_unwind(AssertUnwindSafe(take_part)).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            if self.job.leave() {
                self.done.wake();
            }
        }
        me.inside.store(0, Ordering::Relaxed);
    }
}

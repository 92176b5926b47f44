use super::*;
use proptest::prelude::*;
use std::sync::atomic::AtomicUsize;

/// Divisor of numbers of repetitions: Miri is a thousand times slower, and sees a race without repetitions.
const FEWER: usize = if cfg!(miri) { 100 } else { 1 };

/// Returns the bounds of `pieces` pieces, cut evenly among participants.
fn even(pieces: usize, participants: usize) -> Vec<usize> {
    (0..=participants).map(|t| pieces * t / participants).collect()
}

/// Runs a job in which every piece writes to memory that lives as long as the job, and checks that each piece was done
/// once.
fn check_job(session: &Session<'_>, pieces: usize, delay: impl Fn(usize, usize) + Sync) {
    let done: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
    let entered: Vec<AtomicUsize> = (0..session.participants()).map(|_| AtomicUsize::new(0)).collect();
    session.run(&even(pieces, session.participants()), &|t, own| {
        assert_eq!(entered[t].fetch_add(1, Ordering::Relaxed), 0, "participant {t} entered twice");
        for piece in own {
            delay(t, piece);
            done[piece].fetch_add(1, Ordering::Relaxed);
        }
    });
    let done: Vec<usize> = done.into_iter().map(AtomicUsize::into_inner).collect();
    assert_eq!(done, vec![1; pieces]);
}

/// Makes a pool whose threads do not exist, so that only the caller ever runs.
fn without_threads(threads: usize) -> Pool {
    let mut team = Team::default();
    (team.shared, team.rests) = (Arc::new(Shared::new(threads)), vec![Rest::default(); threads - 1]);
    Pool { threads, process: std::process::id(), team: Mutex::new(team) }
}

fn session_of(pool: &Pool) -> Session<'_> {
    let (mut team, now) = (pool.team.lock().unwrap(), Instant::now());
    let participants = team.take_seats(now);
    Session::new(participants, team, Some(now))
}

proptest! {
    #![proptest_config(crate::cases(64))]

    #[test]
    fn each_piece_is_done_once_whoever_is_late(
        threads in 1..6_usize,
        jobs in prop::collection::vec((0..40_usize, 0..6_usize, 0..400_usize), 1..if cfg!(miri) { 4 } else { 30 }),
    ) {
        let pool = Pool::new(threads).unwrap();
        let session = pool.enter().unwrap();
        for (pieces, slow, delay) in jobs {
            check_job(&session, pieces, |t, piece| {
                if t == slow || piece % 7 == slow {
                    (0..delay / FEWER).for_each(|_| std::hint::spin_loop());
                    (0..delay % 3).for_each(|_| std::thread::yield_now());
                }
            });
        }
    }

    #[test]
    fn nobody_is_waited_for_who_never_runs(threads in 2..6_usize, pieces in 0..50_usize) {
        let pool = without_threads(threads);
        let session = session_of(&pool);
        prop_assert_eq!(session.participants(), threads);
        for _ in 0..3 {
            check_job(&session, pieces, |t, _| assert_eq!(t, 0));
        }
        let counts = [&session.waited, &session.own, &session.all].map(|count| count.load(Ordering::Relaxed));
        prop_assert_eq!(counts, [0, 3 * pieces as u64, 3 * pieces as u64]);
    }
}

#[test]
fn a_thread_that_comes_after_the_job_finds_it_closed() {
    let pool = without_threads(3);
    let session = session_of(&pool);
    let shared = &*session.team.shared;
    for job in 1..=5 {
        // What the job borrows is freed before the others come.
        check_job(&session, 10, |_, _| {});
        for thread in &shared.threads {
            assert!(!shared.job.enter(job));
            shared.take_part(thread, job);
            assert_eq!(thread.inside.load(Ordering::Relaxed), 0);
        }
        assert!(!shared.job.is_new(0) && shared.job.is_empty());
    }
}

#[test]
fn a_thread_that_is_late_for_one_job_does_not_enter_the_next_as_if_it_were_that_one() {
    let job = Job::default();
    job.open();
    let late = job.epoch();
    assert!(job.is_new(late - 1) && !job.is_new(late));
    assert!(job.close());
    job.open();
    assert!(!job.enter(late));
    assert!(job.enter(late + 1) && job.enter(late + 1));
    assert!(!job.leave());
    assert!(!job.close() && !job.is_empty());
    assert!(!job.enter(late + 1));
    assert!(job.leave() && job.is_empty());
}

#[test]
fn own_pieces_come_first_in_order_then_others_from_the_last_on() {
    let unclaimed = Unclaimed::new(3);
    unclaimed.reset(&[0, 3, 5, 8]);
    let counts = [const { Cell::new(0) }; 3];
    let claimed = |participant: usize| Pieces::claimed(&unclaimed, participant, 3, &counts[participant]);
    let mut second = claimed(1).unwrap();
    assert_eq!((second.next(), second.next(), second.next()), (Some(3), Some(4), Some(7)));
    assert_eq!(claimed(0).unwrap().collect::<Vec<_>>(), [0, 1, 2, 6, 5]);
    assert_eq!(second.next(), None);
    assert!(claimed(2).is_none());
    assert_eq!(counts.each_ref().map(Cell::get), [5, 3, 0]);
    unclaimed.reset(&[0, 0, 0, 2]);
    assert_eq!(claimed(0).unwrap().collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn threads_take_part_and_those_that_rest_come_back() {
    let pool = Pool::new(4).unwrap();
    let (mut rested, mut back) = (0, 0);
    for i in 0..if cfg!(miri) { 8 } else { 40 } {
        // Threads to rest are chosen, because lateness depends on the machine.
        let late = i % 8;
        for (index, thread) in pool.enter().unwrap().team.shared.threads.iter().enumerate() {
            thread.late.store(late >> index & 1 == 1, Ordering::Relaxed);
        }
        pool.team.lock().unwrap().rest_the_late(Instant::now());
        for _ in 0..300 / FEWER {
            let session = pool.enter().unwrap();
            rested += usize::from(session.participants() < 4);
            back += usize::from(session.participants() == 4);
            (0..3).for_each(|_| check_job(&session, 9, |_, _| {}));
        }
        pool.team.lock().unwrap().rests.fill(Rest::default());
    }
    assert!(rested > 0 && back > 0, "{rested} {back}");
}

/// Makes the pool's only thread hold a piece until the caller sleeps, and then call `then`.
fn hold(session: &Session<'_>, then: impl Fn() + Sync) {
    let (shared, held) = (&*session.team.shared, AtomicBool::new(false));
    session.run(&[0, 1, 2], &|t, pieces| {
        for _ in pieces {
            if t == 0 {
                while !held.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
            } else {
                held.store(true, Ordering::SeqCst);
                while shared.done.sleepers() == 0 {
                    std::thread::yield_now();
                }
                then();
            }
        }
    });
}

#[test]
fn a_thread_that_the_caller_waits_for_rests_at_once() {
    let pool = Pool::new(2).unwrap();
    let session = pool.enter().unwrap();
    let entered = session.entered.unwrap();
    hold(&session, || {
        let (begin, before) = (Instant::now(), entered.elapsed());
        while begin.elapsed() < before.max(2 * LATE) {
            std::thread::yield_now();
        }
    });
    let thread = &session.team.shared.threads[0];
    assert!(thread.late.load(Ordering::Relaxed));
    assert_eq!(thread.seat.load(Ordering::Relaxed), NO_SEAT);
    for _ in 0..20 / FEWER.min(10) {
        check_job(&session, 10, |t, _| assert_eq!(t, 0));
    }
    drop(session);
    assert_eq!(pool.team.lock().unwrap().rests[0].length, SHORTEST_REST);
}

#[test]
fn a_thread_that_the_caller_hardly_waits_for_keeps_its_seat() {
    let pool = Pool::new(2).unwrap();
    let mut session = pool.enter().unwrap();
    let has_seat = |session: &Session<'_>| session.team.shared.threads[0].seat.load(Ordering::Relaxed) != NO_SEAT;
    session.note_wait(LATE / 2, 0..1);
    assert!(has_seat(&session), "shorter than a machine's own pauses");
    session.entered = Instant::now().checked_sub(10 * LATE);
    (session.own, session.all) = (AtomicU64::new(10), AtomicU64::new(20));
    session.note_wait(LATE, 0..1);
    assert!(has_seat(&session), "less than it saves");
    session.note_wait(10 * LATE, 0..1);
    assert!(!has_seat(&session));
}

#[test]
fn a_thread_that_does_little_may_not_be_waited_for_long() {
    let pool = Pool::new(2).unwrap();
    let mut session = pool.enter().unwrap();
    session.entered = Instant::now().checked_sub(100 * LATE);
    (session.own, session.all) = (AtomicU64::new(100), AtomicU64::new(103));
    session.note_wait(2 * LATE, 0..1);
    assert_eq!(session.team.shared.threads[0].seat.load(Ordering::Relaxed), NO_SEAT);
}

#[test]
fn rests_grow_while_a_thread_stays_late() {
    let pool = Pool::new(2).unwrap();
    let mut team = pool.team.lock().unwrap();
    let mut now = Instant::now();
    for expected in [20, 80, 320, 1000, 1000] {
        team.shared.threads[0].late.store(true, Ordering::Relaxed);
        team.rest_the_late(now);
        assert_eq!(team.rests[0].length, Duration::from_millis(expected));
        assert_eq!(team.take_seats(now), 1);
        now += Duration::from_millis(expected);
        assert_eq!(team.take_seats(now), 2);
        team.rest_the_late(now);
        assert_eq!(team.take_seats(now), 2);
    }
    now += Duration::from_secs(11);
    team.shared.threads[0].late.store(true, Ordering::Relaxed);
    team.rest_the_late(now);
    assert_eq!(team.rests[0].length, SHORTEST_REST);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    for threads in [1, 3] {
        let pool = Pool::new(threads).unwrap();
        for bad in 0..6 {
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let session = pool.enter().unwrap();
                check_job(&session, 6, |_, piece| assert!(piece != bad, "as it should"));
            }));
            assert!(panicked.is_err());
            check_job(&pool.enter().unwrap(), 6, |_, _| {});
        }
    }
}

#[test]
fn a_panic_in_another_thread_reaches_the_caller() {
    let pool = Pool::new(2).unwrap();
    for _ in 0..2 {
        let panicked = catch_unwind(AssertUnwindSafe(|| hold(&pool.enter().unwrap(), || panic!("as it should"))));
        let said = panicked.unwrap_err();
        assert_eq!(said.downcast_ref(), Some(&"a thread of the pool panicked"));
        // The caller has waited for that thread, which may rest now.
        pool.team.lock().unwrap_or_else(PoisonError::into_inner).rests.fill(Rest::default());
    }
    check_job(&pool.enter().unwrap(), 6, |_, _| {});
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
                    check_job(&session, 5, |_, _| {});
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
    });
}

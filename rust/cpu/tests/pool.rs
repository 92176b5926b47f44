//! Ends of pools: they leave no thread, and a forked child gets an error. Runs alone in a process, whose threads it
//! counts.

#![cfg(target_os = "linux")]

mod support;

use specrs_cpu::{Decoder, Output, Pool};
use std::sync::Arc;
use support::{Host, Model, QWEN3, SMALL};

unsafe extern "C" {
    safe fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    safe fn _exit(status: i32) -> !;
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Runs `work` in a forked child and returns its result.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    let child = fork();
    if child == 0 {
        _exit(i32::from(!work()));
    }
    let mut status = -1;
    // SAFETY: the status is this function's own.
    let waited = unsafe { waitpid(child, &raw mut status, 0) };
    waited == child && status == 0
}

/// Checks that dropped pools leave no thread, and that a forked process gets an error. It is one test, because the
/// threads of a second test would be counted, too.
#[test]
fn pools_leave_no_thread_and_forks_get_an_error() {
    let model = Model::random(SMALL, 1, QWEN3, 5);
    let weights = model.weights();
    let before = threads();
    for i in 0..1000 {
        let pool = Arc::new(Pool::new(1 + i % 4).unwrap());
        let mut decoder = Decoder::new(Arc::clone(&weights), Arc::clone(&pool));
        assert!(threads() >= before + i % 4);
        // Dropped at work, and without ever having worked.
        if i % 3 > 0 {
            let mut host = Host::new(&model, 1, 4, 4, 1);
            host.pass(&mut decoder, &[(0, Some(0), 3)], Output::Nothing);
        }
    }
    // A joined thread is listed until the system has taken it down.
    assert!((0..100_000).any(|_| threads() == before), "{} threads, {before} before", threads());

    for count in [1, 3] {
        let mut decoder = Decoder::new(Arc::clone(&weights), Arc::new(Pool::new(count).unwrap()));
        let mut host = Host::new(&model, 1, 4, 4, 1);
        let logits = host.logits(&mut decoder, &[(0, Some(0), 3)]);
        let works = in_child(|| {
            let mut out = [0.0; SMALL.vocab_size];
            match decoder.logits(&[1.0; SMALL.hidden_size], SMALL.vocab_size, &mut out) {
                Ok(()) => count == 1,
                Err(error) => count > 1 && error.to_string().contains("not in its fork"),
            }
        });
        assert!(works, "{count} threads");
        // A child that drops it ends, and the parent's goes on.
        assert!(in_child(|| {
            drop(decoder);
            true
        }));
        let mut decoder = Decoder::new(Arc::clone(&weights), Arc::new(Pool::new(count).unwrap()));
        assert_eq!(host.logits(&mut decoder, &[(0, Some(0), 3)]), logits);
    }
}

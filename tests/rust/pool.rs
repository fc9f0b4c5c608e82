//! The pool: every chunk once, and a way out of everything.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use powerinfer_rs::backend::cpu::pool::{Pool, default_threads};

#[test]
fn every_chunk_runs_once() {
    for threads in [1, 2, 3, 8] {
        let pool = Pool::new(threads).unwrap();
        pool.enter(|team| {
            for n in [0, 1, 2, 7, 1000, 3 << 20] {
                let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                team.run(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        });
    }
}

#[test]
fn a_panic_comes_back_and_the_pool_goes_on() {
    let pool = Pool::new(4).unwrap();
    let run = |bad: usize| {
        catch_unwind(AssertUnwindSafe(|| pool.enter(|team| team.run(100, &|i| assert_ne!(i, bad)))))
    };
    assert!(run(50).is_err());
    assert!(run(1000).is_ok());
}

#[test]
fn thread_counts_are_checked() {
    assert!(Pool::new(0).is_err());
    assert!(Pool::new(1_000_000).is_err());
    assert!(default_threads() >= 1);
}

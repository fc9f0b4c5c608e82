//! How fast this machine streams memory: the yardstick of a decode speed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::pool::Pool;

/// Reads `n_bytes` of fresh memory `repeats` times on all threads of `pool`; the median in bytes a second.
pub fn streaming_read(pool: &Pool, n_bytes: usize, repeats: usize) -> f64 {
    const CHUNK: usize = 1 << 17;
    let data = vec![1u64; (n_bytes / 8).max(CHUNK)];
    let total = AtomicU64::new(0);
    let mut rates: Vec<f64> = (0..repeats.max(1))
        .map(|_| {
            let start = Instant::now();
            pool.enter(|team| {
                team.run(data.len() / CHUNK, &|i| {
                    let mut lanes = [0u64; 32];
                    for values in data[i * CHUNK..][..CHUNK].as_chunks::<32>().0 {
                        for (lane, v) in lanes.iter_mut().zip(values) {
                            *lane ^= v;
                        }
                    }
                    total.fetch_add(lanes.iter().fold(0, |a, b| a ^ b), Ordering::Relaxed);
                });
            });
            (data.len() / CHUNK * CHUNK * 8) as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    std::hint::black_box(total.into_inner());
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

//! What several tests of this crate share.

use std::time::Duration;

use crate::world::World;

/// Runs `body` on a thread for each of these values and returns the results in order.
pub(crate) fn on_threads<T: Send, R: Send>(values: Vec<T>, body: impl Fn(T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads = values.into_iter();
        let threads = threads.map(|value| scope.spawn(move || body(value)));
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.collect()
    })
}

/// Runs `body` on every rank of a world of threads and returns the results in rank order.
pub(crate) fn on_ranks<R: Send>(
    size: usize,
    seed: Option<u64>,
    body: impl Fn(&World) -> R + Sync,
) -> Vec<R> {
    let worlds = World::threads(size, seed, Duration::from_secs(60)).unwrap();
    on_threads(worlds, |world| body(&world))
}

//! Collectives within a host allocate nothing after their first run, counted by this test's
//! allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use ddp_comm::{Group, Reduce, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

/// A wait that lasts this long is tracked, which allocates (patience.rs): a busy machine has some.
const TRACKED_MIN: Duration = Duration::from_millis(200);

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does everything; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn every_call(group: &Group, tensors: &[Tensor], stream: &Stream) {
    for tensor in tensors {
        group.all_reduce(tensor, Reduce::Sum, stream).unwrap();
        group.reduce_scatter(tensor, Reduce::Max, stream).unwrap();
        group.all_gather(tensor, stream).unwrap();
        group.broadcast(tensor, 1, stream).unwrap();
        if group.rank() == 0 {
            group.send(tensor, 1, stream).unwrap();
        } else {
            group.receive(tensor, 0, stream).unwrap();
        }
        group.barrier(stream).unwrap();
    }
}

#[test]
fn after_the_first_round_nothing_is_allocated() {
    std::thread::scope(|scope| {
        for world in World::threads(2, None, Duration::from_secs(60)).unwrap() {
            scope.spawn(move || {
                let group = world.group("main").unwrap();
                let stream = Stream::default_of(Device::Cpu).unwrap();
                let make =
                    |&(count, dtype): &_| Tensor::zeros(&[count], dtype, Device::Cpu).unwrap();
                let tensors: Vec<Tensor> = [
                    (6, DType::F32),
                    (400_000, DType::F32),
                    (300_000, DType::BF16),
                ]
                .iter()
                .map(make)
                .collect();
                every_call(&group, &tensors, &stream);
                for _ in 0..20 {
                    let (before, began) = (ALLOCATIONS.get(), Instant::now());
                    every_call(&group, &tensors, &stream);
                    let had_long_wait = began.elapsed() >= TRACKED_MIN;
                    assert!(had_long_wait || ALLOCATIONS.get() == before);
                }
            });
        }
    });
}

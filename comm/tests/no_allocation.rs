//! Collectives allocate nothing after their first run, counted by this test's allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use ddp_comm::{Group, Options, Reduce, World};
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

fn tensors() -> Vec<Tensor> {
    let sizes = [
        (6, DType::F32),
        (400_000, DType::F32),
        (300_000, DType::BF16),
    ];
    let make = |&(count, dtype): &_| Tensor::zeros(&[count], dtype, Device::Cpu).unwrap();
    sizes.iter().map(make).collect()
}

#[test]
fn after_the_first_round_nothing_is_allocated() {
    std::thread::scope(|scope| {
        for world in World::threads(2, None, Duration::from_secs(60)).unwrap() {
            scope.spawn(move || {
                let group = world.group("main").unwrap();
                let stream = Stream::default_of(Device::Cpu).unwrap();
                let tensors = tensors();
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

/// Messages that arrive early are buffered. How many depends on timing, so a round may allocate;
/// later rounds reuse the buffers. If every message allocated, each of the rounds would do so about
/// 50 times: all of them together have to do it less often than two such rounds.
const KEPT_MAX: usize = 100;
const ROUNDS: usize = 40;

/// Starts this test twice more, as the processes of two ranks.
#[test]
fn between_hosts_calls_use_the_same_memory_again() {
    let name = "between_hosts_calls_use_the_same_memory_again";
    if std::env::var_os("RANK").is_some() {
        return count_between_hosts();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().port().to_string();
    let rank = |(rank, host)| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture"]);
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("DDP_TEST_HOST", host)]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command
            .env("DDP_JOB_SECRET", "the secret of this test")
            .spawn()
            .unwrap()
    };
    let ranks = [("0", "left"), ("1", "right")].map(rank);
    let ends = ranks.map(|mut rank| rank.wait().unwrap());
    assert!(ends.iter().all(|end| end.success()), "{ends:?}");
}

fn count_between_hosts() {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let world = World::connect(&options).unwrap();
    assert_eq!(world.transport(), "shared memory and tcp");
    let group = world.group("main").unwrap();
    let stream = Stream::default_of(Device::Cpu).unwrap();
    let tensors = tensors();
    every_call(&group, &tensors, &stream);
    let (mut allocated, mut counted) = (0, 0);
    for _ in 0..ROUNDS {
        let (before, began) = (ALLOCATIONS.get(), Instant::now());
        every_call(&group, &tensors, &stream);
        let had_long_wait = began.elapsed() >= TRACKED_MIN;
        if !had_long_wait {
            allocated += ALLOCATIONS.get() - before;
            counted += 1;
        }
    }
    assert!(allocated <= KEPT_MAX, "{allocated} in {counted} rounds");
}

//! Every wait in `kernels/` is needed. The simulator can leave out the k-th wait of a run. These
//! scenes use every place that waits; leaving out a wait must be noticed, by a race or another
//! finding, by an error, or by a wrong number. A place whose waits go unnoticed must be in the list
//! of redundant ones, with the reason.
//!
//! A place is tried until it is noticed once; with `DDP_CASES=all` every wait of every scene is
//! left out in turn.

use std::collections::BTreeMap;
use std::process::Command;

use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{self, Chunk, ChunkTable};
use ddp_kernels::stream::{self, Stream, Timer};
use ddp_kernels::transfer::{self, Scalars};
use ddp_kernels::{DType, Device, Tensor, memory};

const FIRST: Device = Device::Cuda(0);
const SECOND: Device = Device::Cuda(1);
const COUNT: usize = 3000;

/// Places whose waits may be left out, and why.
const REDUNDANT: [(&str, &str); 3] = [
    (
        "on at kernels/src/transfer/route.rs",
        "an upload from memory that is not pinned, by `copy_async`: the simulator has read it when the call returns, as CUDA documented once. Newer \
         documentation only says that it may be so",
    ),
    (
        "is_nan at kernels/src/launch/blaslt/epilogue.rs",
        "looked at too early, the library seems to lose NaN. What repairs that then runs where nothing is lost, and changes nothing",
    ),
    (
        "trim at kernels/src/memory/gpu.rs",
        "orders no data: work that is still to be freed would only stay reserved. The simulator's pools count memory as free from the \
         call on, so nobody sees it there",
    ),
];

fn filled(value: f64, device: Device) -> Tensor {
    Tensor::full(&[COUNT], value, DType::F32, device).unwrap()
}

/// A stream that knows nothing of any other.
fn fresh(device: Device) -> Stream {
    Stream::new(device).unwrap()
}

fn pinned(value: f32) -> Tensor {
    let tensor = Tensor::zeros_pinned(&[COUNT], DType::F32).unwrap();
    tensor
        .with_slice_mut(|slots: &mut [f32]| slots.fill(value))
        .unwrap();
    tensor
}

fn assert_all(tensor: &Tensor, value: f32) {
    tensor
        .with_slice(|slots: &[f32]| {
            assert!(slots.iter().all(|&x| x == value), "{tensor}: {}", slots[0])
        })
        .unwrap();
}

/// Every place that waits, in a scene that needs it.
const SCENES: [(&str, fn()); 20] = [
    (
        "a stream's first use of a tensor comes after what made it",
        || {
            let (side, x) = (fresh(FIRST), filled(1.0, FIRST));
            side.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
            side.synchronize().unwrap();
        },
    ),
    ("memory is freed after the streams that used it", || {
        let (side, x) = (fresh(FIRST), filled(1.0, FIRST));
        side.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
    }),
    ("a stream that is told to wait waits", || {
        let (first, second, x) = (fresh(FIRST), fresh(FIRST), filled(1.0, FIRST));
        for stream in [&first, &second] {
            stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
            stream.synchronize().unwrap();
        }
        first.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        second.wait(&first.record().unwrap()).unwrap();
        second.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
    }),
    ("a stream is waited for by the host", || {
        let (host, x) = (pinned(0.0), filled(4.0, FIRST));
        let side = fresh(FIRST);
        let copy = transfer::copy_async(&host, &x, &side).unwrap();
        side.synchronize().unwrap();
        assert!(copy.is_done());
        assert_all(&host, 4.0);
    }),
    ("a device is waited for by the host", || {
        let (host, x) = (pinned(0.0), filled(4.0, FIRST));
        let copy = transfer::copy_async(&host, &x, &fresh(FIRST)).unwrap();
        stream::synchronize(FIRST).unwrap();
        assert!(copy.is_done());
        assert_all(&host, 4.0);
    }),
    (
        "a copy to pinned memory is waited for by its handle",
        || {
            let (host, x) = (pinned(0.0), filled(4.0, FIRST));
            transfer::copy_async(&host, &x, &fresh(FIRST))
                .unwrap()
                .wait()
                .unwrap();
            assert_all(&host, 4.0);
        },
    ),
    ("the CPU's stream waits for a device's event", || {
        let (host, x) = (pinned(0.0), filled(4.0, FIRST));
        let copy = transfer::copy_async(&host, &x, &fresh(FIRST)).unwrap();
        fresh(Device::Cpu).wait(copy.event()).unwrap();
        assert_all(&host, 4.0);
    }),
    (
        "an upload from pinned memory is over when it returns",
        || {
            let host = pinned(1.0);
            let there = host.to(FIRST).unwrap();
            host.with_slice_mut(|slots: &mut [f32]| slots.fill(2.0))
                .unwrap();
            drop(there);
        },
    ),
    (
        "an upload from memory that is not pinned is over when it returns",
        || {
            let (host, there) = (
                Tensor::ones(&[COUNT], DType::F32, Device::Cpu).unwrap(),
                filled(0.0, FIRST),
            );
            for stream in [Stream::default_of(FIRST).unwrap(), fresh(FIRST)] {
                transfer::copy_async(&there, &host, &stream)
                    .unwrap()
                    .wait()
                    .unwrap();
                there.copy_from(&host).unwrap();
            }
            host.with_slice_mut(|slots: &mut [f32]| slots.fill(2.0))
                .unwrap();
            assert_eq!(there.to_vec::<f32>().unwrap(), [1.0; COUNT]);
        },
    ),
    ("a download is over when it returns", || {
        let host = pinned(0.0);
        host.copy_from(&filled(3.0, FIRST)).unwrap();
        assert_all(&host, 3.0);
        let pageable = Tensor::zeros(&[COUNT], DType::F32, Device::Cpu).unwrap();
        // Nobody waits for it: it is over.
        drop(
            transfer::copy_async(
                &pageable,
                &filled(4.0, FIRST),
                &Stream::default_of(FIRST).unwrap(),
            )
            .unwrap(),
        );
        assert_all(&pageable, 4.0);
        assert_eq!(filled(3.0, FIRST).slice(0..1).unwrap().item().unwrap(), 3.0);
    }),
    (
        "a copy between devices comes after what the source's stream was given, and before what it will be",
        || {
            let (x, there) = (filled(5.0, FIRST), filled(0.0, SECOND));
            for _ in 0..3 {
                ops::scale_into(&x, &x, 2.0).unwrap();
                there.copy_from(&x).unwrap();
            }
            ops::zero(&x).unwrap();
            assert_eq!(there.to_vec::<f32>().unwrap(), [40.0; COUNT]);
        },
    ),
    (
        "a copy between devices on a stream of the target's, and one of the source's",
        || {
            for device in [FIRST, SECOND] {
                let (x, there) = (filled(5.0, FIRST), filled(0.0, SECOND));
                let side = fresh(device);
                transfer::copy_async(&there, &x, &side)
                    .unwrap()
                    .wait()
                    .unwrap();
                assert_eq!(there.to_vec::<f32>().unwrap(), [5.0; COUNT]);
                side.scope(|| {
                    if device == FIRST {
                        ops::scale_into(&x, &x, 2.0)
                    } else {
                        ops::scale_into(&there, &there, 2.0)
                    }
                })
                .unwrap();
                drop(transfer::copy_async(&there, &x, &side).unwrap());
                side.scope(|| {
                    if device == FIRST {
                        ops::zero(&x)
                    } else {
                        ops::zero(&there)
                    }
                })
                .unwrap();
            }
        },
    ),
    ("a large copy between devices goes in pieces", || {
        let large = Tensor::full(&[(40 << 20) / 4], 6.0, DType::F32, FIRST).unwrap();
        let there = large.to(SECOND).unwrap();
        ops::zero(&large).unwrap();
        assert_eq!(
            there.slice(0..3).unwrap().to_vec::<f32>().unwrap(),
            [6.0; 3]
        );
        let end = there.count();
        assert_eq!(
            there.slice(end - 3..end).unwrap().to_vec::<f32>().unwrap(),
            [6.0; 3]
        );
    }),
    (
        "a table of chunks is read on a stream that did not bring it",
        || {
            let chunk = |offset| Chunk {
                offset,
                len: 100,
                decay: true,
            };
            let table = ChunkTable::new(vec![chunk(0), chunk(1500)]).unwrap();
            let grads = filled(1.0, FIRST);
            for stream in [Stream::default_of(FIRST).unwrap(), fresh(FIRST)] {
                let partials = Tensor::zeros(&[table.quanta()], DType::F64, FIRST).unwrap();
                stream
                    .scope(|| ops::grad_norm_partials(&partials, &grads, &table))
                    .unwrap();
                assert_eq!(
                    stream.scope(|| partials.to_vec::<f64>()).unwrap(),
                    [100.0; 2]
                );
            }
        },
    ),
    ("a matmul with an activation", || {
        let x = filled(1.0, FIRST).reshape(&[30, 100]).unwrap();
        let (y, weight) = (
            x.new_zeros(&[30, 8]).unwrap(),
            x.new_full(&[8, 100], -1.0).unwrap(),
        );
        ops::linear_into(&y, &x, &weight, None, Some(ops::Activation::Relu), None).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [0.0; 240]);
    }),
    ("a message is overwritten after it was read", || {
        let (mut ring, number) = (
            Scalars::new(FIRST, 1).unwrap(),
            Tensor::zeros(&[1], DType::I64, FIRST).unwrap(),
        );
        for k in 0..7i64 {
            ring.send(&number, &[k]).unwrap();
        }
        assert_eq!(number.item().unwrap(), 6.0);
    }),
    (
        "a timer starts when all is done, and stops when all is done",
        || {
            let (side, x) = (fresh(FIRST), filled(1.0, FIRST));
            let work = || {
                side.scope(|| ops::scale_into(&x, &x, 2.0))
                    .and_then(|()| side.record())
                    .unwrap()
            };
            let before = work();
            let timer = Timer::start(FIRST).unwrap();
            assert!(before.is_done());
            let during = work();
            timer.elapsed().unwrap();
            assert!(during.is_done());
        },
    ),
    (
        "the time between events of two streams is known when both are over",
        || {
            let (first, second) = (fresh(FIRST), fresh(FIRST));
            let busy = |stream: &Stream| {
                let x = filled(1.0, FIRST);
                (0..5)
                    .try_for_each(|_| stream.scope(|| ops::scale_into(&x, &x, 2.0)))
                    .unwrap();
                stream.record_timed().unwrap()
            };
            let idle = second.record_timed().unwrap();
            busy(&first).since(&idle).unwrap();
            let late = busy(&first);
            second.record_timed().unwrap().since(&late).unwrap();
        },
    ),
    (
        "a graph comes after what the device's current stream was given, and before what it will be",
        || {
            let (main, x) = (fresh(FIRST), filled(1.0, FIRST));
            let body = || ops::scale_into(&x, &x, 2.0);
            main.scope(body).unwrap();
            main.synchronize().unwrap();
            let graph = Graph::capture(&main, body).unwrap();
            ops::scale_into(&x, &x, 3.0).unwrap();
            graph.launch().unwrap();
            ops::scale_into(&x, &x, 5.0).unwrap();
            assert_eq!(x.to_vec::<f32>().unwrap(), [60.0; COUNT]);
        },
    ),
    (
        "streams join a graph by its events, and what is kept is given back",
        || {
            let (main, side) = (fresh(FIRST), fresh(FIRST));
            let (x, y) = (filled(1.0, FIRST), filled(1.0, FIRST));
            let body = || {
                ops::scale_into(&x, &x, 2.0)?;
                side.wait(&main.record()?)?;
                side.scope(|| ops::axpy(&y, 1.0, &x))?;
                main.wait(&side.record()?)?;
                ops::scale_into(&x, &x, 3.0)
            };
            main.scope(body).unwrap();
            let graph = Graph::capture(&main, body).unwrap();
            graph.launch().unwrap();
            graph.launch().unwrap();
            assert_eq!(main.scope(|| x.to_vec::<f32>()).unwrap(), [216.0; COUNT]);
            drop((graph, x, y));
            memory::empty_cache(FIRST);
        },
    ),
];

/// Waits until the devices are done, so that mistakes show.
fn finish() {
    for device in [FIRST, SECOND] {
        stream::synchronize(device).unwrap();
    }
}

/// Run by the test below, in a separate process.
#[test]
#[ignore = "runs as part of every_wait_is_needed"]
fn scenario() {
    let chosen: usize = std::env::var("DDP_TEST_SCENE").unwrap().parse().unwrap();
    SCENES[chosen].1();
    finish();
}

/// How a scene ends with these variables.
fn run(scene: usize, variables: &[(&str, &str)]) -> (bool, String) {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args([
        "--exact",
        "scenario",
        "--include-ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command
        .env("DDP_TEST_SCENE", scene.to_string())
        .envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// The place in `kernels/` that waits, from a call stack: the innermost frame that is not a helper
/// for all waits (the driver's wrappers, and `stream.rs` where `kernels/` calls it). None for
/// `finish`.
fn place_of(stack: &str) -> Option<String> {
    let frames: Vec<&str> = stack.split(" < ").collect();
    if frames
        .iter()
        .any(|frame| frame.starts_with("finish at tests/waits.rs"))
    {
        return None;
    }
    let own = |frame: &str| frame.contains(" at kernels/src/");
    let wrapper = |frame: &str| {
        own(frame) && (frame.contains("cuda/calls.rs") || frame.contains("{closure} at"))
    };
    let shared = |frame: &str| {
        frame.contains("kernels/src/stream.rs") || frame.contains("kernels/src/cuda/queue.rs")
    };
    let mut place = None;
    for (index, frame) in frames
        .iter()
        .enumerate()
        .filter(|(_, frame)| own(frame) && !wrapper(frame))
    {
        place = Some((*frame).to_string());
        let called_by_own = frames[index + 1..]
            .iter()
            .find(|next| !wrapper(next))
            .is_some_and(|next| own(next));
        if !(shared(frame) && called_by_own) {
            break;
        }
    }
    place
}

/// The waits of a scene: number and place.
fn waits_of(scene: usize, no_peer: &str) -> Vec<(String, String)> {
    let list = std::env::temp_dir().join(format!("waits-{}-{scene}-{no_peer}", std::process::id()));
    let file = list.to_str().unwrap();
    let (passed, text) = run(
        scene,
        &[("SIMCUDA_COUNT_WAITS", file), ("SIMCUDA_NO_PEER", no_peer)],
    );
    assert!(passed, "{}, with every wait: {text}", SCENES[scene].0);
    let waits = std::fs::read_to_string(&list).unwrap();
    let _ = std::fs::remove_file(&list);
    let parts = |line: &str| {
        let (number, rest) = line.split_once(' ')?;
        Some((number.to_string(), place_of(rest.split_once(' ')?.1)?))
    };
    waits.lines().filter_map(parts).collect()
}

#[test]
fn every_wait_is_needed() {
    if !ddp_tests::simulated_gpus(2) {
        return;
    }
    /// A place that waits: how often it waits, and how often leaving a wait out was noticed.
    #[derive(Default)]
    struct Seen {
        waits: usize,
        noticed: usize,
    }
    let mut places: BTreeMap<String, Seen> = BTreeMap::new();
    let first = ddp_testing::cases("first scene of waits", SCENES.len(), 1)[0];
    // With peer access between devices, and without.
    for no_peer in ["0", "1"] {
        for scene in (0..SCENES.len()).map(|scene| (first + scene) % SCENES.len()) {
            if no_peer == "1" && !SCENES[scene].0.contains("between devices") {
                continue;
            }
            for (number, place) in waits_of(scene, no_peer) {
                let known = places.entry(place.clone()).or_default();
                if known.noticed > 0 && !ddp_testing::all_cases() {
                    known.waits += 1;
                    continue;
                }
                let (passed, _) = run(
                    scene,
                    &[
                        ("SIMCUDA_IGNORE_WAIT", number.as_str()),
                        ("SIMCUDA_NO_PEER", no_peer),
                    ],
                );
                let seen = places.entry(place).or_default();
                seen.waits += 1;
                seen.noticed += usize::from(!passed);
            }
        }
    }
    let table: Vec<String> = places
        .iter()
        .map(|(place, seen)| format!("{place}: {} of {} noticed", seen.noticed, seen.waits))
        .collect();
    println!("{}", table.join("\n"));
    let argued = |place: &str| REDUNDANT.iter().any(|(known, _)| place.starts_with(known));
    let unnoticed: Vec<&String> = places
        .iter()
        .filter(|(place, seen)| seen.noticed == 0 && !argued(place))
        .map(|(place, _)| place)
        .collect();
    assert!(
        unnoticed.is_empty(),
        "left out and not noticed: {unnoticed:?}\n{}",
        table.join("\n")
    );
    for (known, _) in REDUNDANT {
        assert!(
            places.keys().any(|place| place.starts_with(known)),
            "{known} no longer waits: {}",
            table.join("\n")
        );
    }
    assert!(places.len() >= 15, "{}", table.join("\n"));
}

//! Every wait of `kernels/` is needed. The simulator can leave out the k-th wait of a run: this goes through all waits of a
//! scenario that has each kind of them in it, leaves out one at a time, and sees that it is noticed, as a race or another finding, or as an
//! error. What is not noticed must be in the list of waits that are redundant, with the reason.

use std::process::Command;

use ddp_kernels::stream::{self, Graph, Stream, Timer};
use ddp_kernels::transfer::{self, Scalars};
use ddp_kernels::{DType, Device, Tensor, memory, ops};

const FIRST: Device = Device::Cuda(0);
const SECOND: Device = Device::Cuda(1);
const COUNT: usize = 3000;

/// Waits that may be left out, by a function on their call stack, and why.
const REDUNDANT: [(&str, &str); 0] = [];

fn filled(value: f64, device: Device) -> Tensor {
    Tensor::full(&[COUNT], value, DType::F32, device).unwrap()
}

/// A stream that knows nothing of any other.
fn fresh(device: Device) -> Stream {
    Stream::new(device).unwrap()
}

fn pinned(value: f32) -> Tensor {
    let tensor = Tensor::zeros_pinned(&[COUNT], DType::F32).unwrap();
    tensor.with_slice_mut(|slots: &mut [f32]| slots.fill(value)).unwrap();
    tensor
}

fn assert_all(tensor: &Tensor, value: f32) {
    tensor.with_slice(|slots: &[f32]| assert!(slots.iter().all(|&x| x == value), "{tensor}: {}", slots[0])).unwrap();
}

/// Everything that waits, each in a place where it is needed.
const SCENES: [(&str, fn()); 13] = [
    ("the first use on another stream comes after the allocation", || {
        let (side, x) = (fresh(FIRST), Tensor::empty(&[COUNT], DType::F32, FIRST).unwrap());
        side.scope(|| ops::fill_into(&x, 1.0)).unwrap();
        stream::synchronize(FIRST).unwrap();
    }),
    ("memory is freed after the streams that used it", || {
        let (side, x) = (fresh(FIRST), filled(1.0, FIRST));
        side.wait(&Stream::default_of(FIRST).unwrap().record().unwrap()).unwrap();
        side.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        drop(x);
        stream::synchronize(FIRST).unwrap();
    }),
    ("an upload from pinned memory is over when it returns", || {
        let host = pinned(1.0);
        let there = host.to(FIRST).unwrap();
        host.with_slice_mut(|slots: &mut [f32]| slots.fill(2.0)).unwrap();
        drop(there);
    }),
    ("a download is over when it returns", || {
        assert_eq!(filled(3.0, FIRST).to_vec::<f32>().unwrap(), [3.0; COUNT]);
        assert_eq!(filled(3.0, FIRST).slice(0..1).unwrap().item().unwrap(), 3.0);
    }),
    ("a download to pinned memory is over when it returns", || {
        let host = pinned(0.0);
        host.copy_from(&filled(3.0, FIRST)).unwrap();
        assert_all(&host, 3.0);
    }),
    ("a copy to pinned memory in flight is waited for by its handle", || {
        let (host, x, side) = (pinned(0.0), filled(4.0, FIRST), fresh(FIRST));
        side.wait(&Stream::default_of(FIRST).unwrap().record().unwrap()).unwrap();
        transfer::copy_async(&host, &x, &side).unwrap().wait().unwrap();
        assert_all(&host, 4.0);
    }),
    ("a copy to ordinary memory on a stream", || {
        let (host, x) = (Tensor::zeros(&[COUNT], DType::F32, Device::Cpu).unwrap(), filled(4.0, FIRST));
        let copy = transfer::copy_async(&host, &x, &Stream::default_of(FIRST).unwrap()).unwrap();
        assert_all(&host, 4.0);
        drop(copy);
    }),
    ("a device's copy comes after what the other device's stream was given, and before what it will be", || {
        let x = filled(5.0, FIRST);
        let there = x.to(SECOND).unwrap();
        ops::zero(&x).unwrap();
        assert_eq!(there.to_vec::<f32>().unwrap(), [5.0; COUNT]);
    }),
    ("a large copy between devices", || {
        let large = Tensor::full(&[(40 << 20) / 4], 6.0, DType::F32, FIRST).unwrap();
        let there = large.to(SECOND).unwrap();
        ops::zero(&large).unwrap();
        assert_eq!(there.slice(0..3).unwrap().to_vec::<f32>().unwrap(), [6.0; 3]);
    }),
    ("a message is overwritten after it was read", || {
        let (mut ring, number) = (Scalars::new(FIRST, 1).unwrap(), Tensor::zeros(&[1], DType::I64, FIRST).unwrap());
        for k in 0..7i64 {
            ring.send(&number, &[k]).unwrap();
        }
        assert_eq!(number.item().unwrap(), 6.0);
    }),
    ("a timer measures work, not its launch; two timed events are both over", || {
        let (side, x) = (fresh(FIRST), filled(1.0, FIRST));
        let timer = Timer::start(FIRST).unwrap();
        let start = side.record_timed().unwrap();
        side.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        let end = side.record_timed().unwrap();
        end.since(&start).unwrap();
        timer.elapsed().unwrap();
    }),
    ("streams join a graph by its events", || {
        let (main, side) = (fresh(FIRST), fresh(FIRST));
        let (x, y) = (filled(1.0, FIRST), filled(1.0, FIRST));
        for stream in [&main, &side] {
            stream.wait(&Stream::default_of(FIRST).unwrap().record().unwrap()).unwrap();
        }
        let body = || {
            ops::scale_into(&x, &x, 2.0)?;
            side.wait(&main.record()?)?;
            side.scope(|| ops::add_into(&y, &y, &x))?;
            main.wait(&side.record()?)?;
            ops::scale_into(&x, &x, 3.0)
        };
        main.scope(body).unwrap();
        let graph = Graph::capture(&main, body).unwrap();
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(main.scope(|| x.to_vec::<f32>()).unwrap(), [216.0; COUNT]);
    }),
    ("what is kept for reuse is given back after its last use", || {
        drop(filled(1.0, FIRST));
        memory::empty_cache(FIRST);
        memory::empty_cache(Device::Cpu);
    }),
];

/// Run by the test below, in a process of its own.
#[test]
#[ignore = "a part of every_wait_is_needed"]
fn scenario() {
    let chosen: usize = std::env::var("DDP_TEST_SCENE").unwrap().parse().unwrap();
    SCENES[chosen].1();
}

/// How a scene ends with these variables.
fn run(scene: usize, variables: &[(&str, &str)]) -> (bool, String) {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "scenario", "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env("DDP_TEST_SCENE", scene.to_string()).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

#[test]
fn every_wait_is_needed() {
    if !ddp_tests::gpus(2) || !ddp_kernels::device::discover().gpus[0].name.contains("Simulated") {
        return;
    }
    let mut unnoticed = Vec::new();
    let mut waits_seen = 0;
    // Where devices see each other, and where they do not.
    for no_peer in ["0", "1"] {
        for (scene, (what, _)) in SCENES.iter().enumerate() {
            let list = std::env::temp_dir().join(format!("waits-{}-{scene}-{no_peer}", std::process::id()));
            let file = list.to_str().unwrap();
            let (passed, text) = run(scene, &[("SIMCUDA_COUNT_WAITS", file), ("SIMCUDA_NO_PEER", no_peer)]);
            assert!(passed, "{what}, with every wait: {text}");
            let waits = std::fs::read_to_string(&list).unwrap();
            // Nobody needs it any more; a failure to remove it is of no consequence.
            let _ = std::fs::remove_file(&list);
            // A wait is a line that begins with its number, and its call stack below.
            let mut waits_of_scene: Vec<(String, String)> = Vec::new();
            for line in waits.lines() {
                let number = line.split_whitespace().next().filter(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
                match (number, waits_of_scene.last_mut()) {
                    (Some(number), _) => waits_of_scene.push((number.to_string(), line.to_string())),
                    (None, Some((_, stack))) => stack.extend(["\n", line]),
                    (None, None) => {}
                }
            }
            for (number, stack) in waits_of_scene {
                waits_seen += 1;
                let (passed, _) = run(scene, &[("SIMCUDA_IGNORE_WAIT", number.as_str()), ("SIMCUDA_NO_PEER", no_peer)]);
                let argued = REDUNDANT.iter().any(|(function, _)| stack.contains(function));
                if passed && !argued {
                    unnoticed.push(format!("{what} (no_peer={no_peer}): wait {stack}"));
                }
            }
        }
    }
    assert!(waits_seen > 2 * SCENES.len(), "only {waits_seen} waits were seen");
    assert!(unnoticed.is_empty(), "left out, and nobody noticed:\n{}", unnoticed.join("\n"));
}

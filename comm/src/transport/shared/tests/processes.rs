//! Ranks that are processes: this test binary, started again.

use std::process::{Child, Command, Stdio};

use super::*;

const JOB: &str = "DDP_TEST_JOB";

/// Starts `size` processes of this binary on one segment; each runs `scenario` as one rank.
fn start(size: usize, scenario: &str) -> (Segment, Vec<Child>) {
    let segment = Segment::create(size).unwrap();
    let spawn = |rank: usize| {
        let job = format!(
            "{} {} {rank} {size} {scenario}",
            std::process::id(),
            segment.fd()
        );
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "transport::shared::tests::processes::a_rank",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(JOB, job)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children = (0..size).map(spawn).collect();
    (segment, children)
}

/// What a process wrote, and whether it was content.
pub(super) fn finish(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr]
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .concat();
    (output.status.success(), text)
}

/// Runs a scenario on `size` processes that all must be content.
pub(super) fn run(size: usize, scenario: &str) -> Vec<String> {
    let (_segment, children) = start(size, scenario);
    let all: Vec<(bool, String)> = children.into_iter().map(finish).collect();
    for (rank, (content, text)) in all.iter().enumerate() {
        assert!(content, "rank {rank}: {text}");
    }
    all.into_iter().map(|(_, text)| text).collect()
}

/// Not a test itself: what the processes started above run.
#[test]
#[ignore = "run by other tests, as processes"]
fn a_rank() {
    let Ok(job) = std::env::var(JOB) else { return };
    let words: Vec<&str> = job.split(' ').collect();
    let number = |index: usize| words[index].parse::<usize>().unwrap();
    let segment = Segment::open(number(0) as u32, number(1) as i32, number(3)).unwrap();
    let (rank, size) = (number(2), number(3));
    let group = |channel: usize, name: &'static str, timeout: Duration| {
        let shared = Shared::new(
            segment.clone(),
            channel,
            rank,
            (0..size).collect(),
            true,
            None,
        )
        .unwrap();
        Group::new(std::sync::Arc::new(shared), name, timeout)
    };
    let board = Board::new(&segment);
    let main = group(0, "main", LONG);
    match words[4] {
        "right" => right(&main),
        "stuck" => stuck(&main, &group(1, "gradients", SHORT)),
        "speed" => speed::in_this_process(&main),
        other => panic!("no scenario {other}"),
    }
    board.leave(rank);
}

/// Every kind of call, large and small, with values that all know.
fn right(group: &Group) {
    let (rank, size, stream) = (group.rank(), group.size(), stream());
    for count in [0, 1, 1000, 300_000] {
        let value = |rank: usize, index: usize| ((index * 31 + rank * 7) % 1000) as f32;
        let all: Vec<f32> = (0..count * size).map(|index| value(rank, index)).collect();
        let make = || Tensor::from_slice(&all, &[all.len()], Device::Cpu).unwrap();
        let sums: Vec<f32> = (0..all.len())
            .map(|index| (0..size).map(|rank| value(rank, index)).sum())
            .collect();

        let reduced = make();
        group.all_reduce(&reduced, Reduce::Sum, &stream).unwrap();
        assert!(
            reduced.to_vec::<f32>().unwrap() == sums,
            "all_reduce of {count}"
        );

        let scattered = make();
        group
            .reduce_scatter(&scattered, Reduce::Sum, &stream)
            .unwrap();
        let mine = rank * count..(rank + 1) * count;
        assert!(
            scattered.to_vec::<f32>().unwrap()[mine.clone()] == sums[mine],
            "reduce_scatter of {count}"
        );
        group.all_gather(&scattered, &stream).unwrap();
        assert!(
            scattered.to_vec::<f32>().unwrap() == sums,
            "all_gather of {count}"
        );

        let sent = make();
        let root = count % size;
        group.broadcast(&sent, root, &stream).unwrap();
        let roots: Vec<f32> = (0..all.len()).map(|index| value(root, index)).collect();
        assert!(
            sent.to_vec::<f32>().unwrap() == roots,
            "broadcast of {count}"
        );

        // Round the ring: rank 0 sends first, the others receive first.
        let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
        let (given, got) = (make(), make().zeros_like().unwrap());
        if rank == 0 {
            group.send(&given, next, &stream).unwrap();
            group.receive(&got, last, &stream).unwrap();
        } else {
            group.receive(&got, last, &stream).unwrap();
            group.send(&given, next, &stream).unwrap();
        }
        let lasts: Vec<f32> = (0..all.len()).map(|index| value(last, index)).collect();
        assert!(
            got.to_vec::<f32>().unwrap() == lasts,
            "send and receive of {count}"
        );
        group.barrier(&stream).unwrap();
    }
}

/// All start together; then rank 1 never comes.
fn stuck(main: &Group, gradients: &Group) {
    let stream = stream();
    main.barrier(&stream).unwrap();
    if main.rank() == 1 {
        // Sleep: it is killed meanwhile.
        std::thread::sleep(LONG);
    }
    let tensor = Tensor::zeros(&[5], DType::F32, Device::Cpu).unwrap();
    println!("{:?}", gradients.all_reduce(&tensor, Reduce::Sum, &stream));
}

#[test]
fn processes_compute_what_one_loop_computes() {
    run(2, "right");
    run(3, "right");
}

#[test]
fn a_killed_process_is_named_by_all_others() {
    let (segment, mut children) = start(3, "stuck");
    let board = Board::new(&segment);
    // Killed when it is through the barrier: from there it never comes to the next call.
    while board.activity(1, 0).is_none_or(|seen| seen.in_progress) {
        assert_eq!(children[1].try_wait().unwrap(), None);
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(1));
    }
    children[1].kill().unwrap();
    for (rank, child) in children.into_iter().enumerate() {
        let (_, text) = finish(child);
        assert!(
            rank == 1
                || text.contains("all_reduce sum of f32[5] on cpu (call 0 of group gradients"),
            "{text}"
        );
        assert!(
            rank == 1 || text.contains("rank 1 did not arrive within 20 s"),
            "{text}"
        );
    }
    assert!(board.has_left(0) && !board.has_left(1));
}

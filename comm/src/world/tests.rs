//! Worlds within one process. Those of several processes: `tests/mpirun`.

use ddp_kernels::{DType, Tensor};

use super::*;
use crate::Reduce;
use crate::tests::on_ranks;
use crate::transport::shared::CHANNELS;

#[test]
fn a_world_of_one_works_alone() {
    let world = World::single().unwrap();
    assert_eq!(
        (
            world.rank(),
            world.size(),
            world.local_rank(),
            world.local_size(),
            world.hosts()
        ),
        (0, 1, 0, 1, 1)
    );
    assert!(!world.host().is_empty());
    assert_eq!(
        (
            world.transport(),
            world.core_offset(),
            world.affinity_note()
        ),
        ("alone", 0, None)
    );
    assert_eq!(world.default_threads(), ddp_kernels::threads::cores().len());
    world.barrier().unwrap();
    world.watch().unwrap();
    assert_eq!(world.all_gather_bytes(b"me").unwrap(), [b"me"]);
    let mut bytes = b"mine".to_vec();
    world.broadcast_bytes(&mut bytes, 0).unwrap();
    assert_eq!(bytes, b"mine");
    assert_eq!(world.group("main").unwrap().size(), 1);
}

#[test]
fn every_rank_knows_its_rank_and_size() {
    let places = on_ranks(3, None, |world| {
        (
            world.rank(),
            world.size(),
            world.local_rank(),
            world.local_size(),
        )
    });
    assert_eq!(places, [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]);
}

#[test]
fn bytes_of_every_length_reach_every_rank() {
    for seed in [None, Some(7)] {
        let brought = |rank: usize| vec![rank as u8; [0, 70_000, 3][rank]];
        let gathered = on_ranks(3, seed, |world| {
            world.all_gather_bytes(&brought(world.rank())).unwrap()
        });
        assert!(
            gathered
                .iter()
                .all(|all| *all == [brought(0), brought(1), brought(2)])
        );
        assert!(
            on_ranks(2, seed, |world| world.all_gather_bytes(b"").unwrap())
                .iter()
                .all(|all| *all == [b"", b""])
        );
        for root in 0..3 {
            let told = on_ranks(3, seed, |world| {
                let mut bytes = brought(world.rank());
                world.broadcast_bytes(&mut bytes, root).unwrap();
                bytes
            });
            assert!(told.iter().all(|bytes| *bytes == brought(root)));
        }
    }
}

#[test]
fn groups_are_independent() {
    let sums = on_ranks(2, Some(3), |world| {
        let (first, second) = (
            world.group("first").unwrap(),
            world.group("second").unwrap(),
        );
        let stream = Stream::default_of(Device::Cpu).unwrap();
        let (one, ten) = (
            Tensor::ones(&[3], DType::F32, Device::Cpu),
            Tensor::full(&[3], 10.0, DType::F32, Device::Cpu),
        );
        let (one, ten) = (one.unwrap(), ten.unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| second.all_reduce(&ten, Reduce::Sum, &stream).unwrap());
            first.all_reduce(&one, Reduce::Sum, &stream).unwrap();
        });
        [
            one.to_vec::<f32>().unwrap()[2],
            ten.to_vec::<f32>().unwrap()[2],
        ]
    });
    assert_eq!(sums, [[2.0, 20.0]; 2]);
}

#[test]
fn a_group_that_is_no_longer_used_is_used_again_and_one_too_many_is_refused_with_help() {
    on_ranks(2, Some(4), |world| {
        let mut groups: Vec<Group> = (1..CHANNELS)
            .map(|_| world.group("more").unwrap())
            .collect();
        assert_eq!(groups.len(), 11);
        for _ in 0..2 {
            // While one rank uses it, no rank gets it.
            let freed = (world.rank() == 1).then(|| groups.remove(3));
            drop(freed);
            let message = world.group("again").unwrap_err().to_string();
            let expected = "again: at most 12 groups may be in use, including the world's own; help: make \
                            each group once, and clone it";
            assert!(message.contains(expected), "{message}");
            if world.rank() == 0 {
                drop(groups.remove(3));
            }
            groups.push(world.group("more").unwrap());
        }
        let stream = Stream::default_of(Device::Cpu).unwrap();
        let one = Tensor::ones(&[3], DType::F32, Device::Cpu).unwrap();
        for group in &groups {
            group.all_reduce(&one, Reduce::Sum, &stream).unwrap();
        }
        assert_eq!(one.to_vec::<f32>().unwrap(), [2048.0; 3]);
        drop(groups);
        world.group("another").unwrap();
    });
}

#[test]
fn a_missing_rank_is_named_with_the_callers_line() {
    let mut worlds = World::threads(2, None, Duration::from_millis(50)).unwrap();
    let error = worlds.remove(1).barrier().unwrap_err();
    let message = error.to_string();
    assert_eq!(error.exit_code(), 77);
    assert!(
        message.contains("barrier") && message.contains("rank 0 did not arrive"),
        "{message}"
    );
    assert!(message.contains("world/tests.rs"), "{message}");
}

/// The others waited for as long as for a rank that hangs: 60 s in each test that failed.
#[test]
fn a_rank_thread_that_panics_fails_the_calls_of_the_others() {
    let mut worlds = World::threads(2, None, Duration::from_secs(60)).unwrap();
    let panics = worlds.remove(1);
    let error = std::thread::scope(|scope| {
        let panics = scope.spawn(move || {
            let _dropped_by_the_panic = panics;
            panic!("as a failed assertion does");
        });
        let error = worlds[0].barrier().unwrap_err();
        assert!(panics.join().is_err());
        error
    });
    assert_eq!(error.exit_code(), 70);
    let message = error.to_string();
    assert!(message.contains("rank 1"), "{message}");
    assert!(message.contains("ended by a panic"), "{message}");
}

#[test]
fn a_world_can_move_to_another_thread() {
    fn can_move<T: Send + Sync>() {}
    can_move::<World>();
}

#[test]
fn ranks_that_share_the_cores_divide_them() {
    let cores = ddp_kernels::threads::cores().len();
    let shares = on_ranks(2, None, |world| {
        (world.default_threads(), world.core_offset())
    });
    let threads = (cores / 2).max(1);
    assert_eq!(shares, [(threads, 0), (threads, threads % cores)]);
}

#[test]
fn a_program_has_the_name_of_its_file() {
    let own = std::env::current_exe().unwrap();
    assert_eq!(
        Options::default().program,
        own.file_name().unwrap().to_string_lossy()
    );
}

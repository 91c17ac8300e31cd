//! What happens if a rank makes another call, is late, stops, leaves or fails.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use super::*;
use crate::transport::shared::futex::Counter;

fn zeros(count: usize, dtype: DType) -> Tensor {
    Tensor::zeros(&[count], dtype, Device::Cpu).unwrap()
}

/// A call on a group.
type Make = Box<dyn Fn(&Group) -> Result<()> + Sync>;

fn all_reduce(count: usize, dtype: DType, reduce: Reduce) -> (Make, String) {
    let name = format!("all_reduce {} of {dtype} × {count}", reduce.name());
    (
        Box::new(move |group| group.all_reduce(&zeros(count, dtype), reduce, &stream())),
        name,
    )
}

#[test]
fn ranks_out_of_step_find_out_and_name_each_other() {
    let base = || all_reduce(10, DType::F32, Reduce::Sum);
    let root = |root: usize| -> (Make, String) {
        let make = move |group: &Group| group.broadcast(&zeros(10, DType::F32), root, &stream());
        (
            Box::new(make),
            format!("broadcast from rank {root} of f32 × 10"),
        )
    };
    let barrier: (Make, String) = (
        Box::new(|group: &Group| group.barrier(&stream())),
        "barrier".into(),
    );
    let gather: Make =
        Box::new(|group: &Group| group.all_gather(&zeros(10, DType::F32), &stream()));
    let pairs: Vec<((Make, String), (Make, String))> = vec![
        (base(), all_reduce(11, DType::F32, Reduce::Sum)),
        (base(), all_reduce(1_000_000, DType::F32, Reduce::Sum)),
        (base(), all_reduce(10, DType::F64, Reduce::Sum)),
        (base(), all_reduce(10, DType::F32, Reduce::Max)),
        (
            all_reduce(1_000_000, DType::F32, Reduce::Sum),
            all_reduce(999_999, DType::F32, Reduce::Sum),
        ),
        (base(), barrier),
        (base(), (gather, "all_gather of f32 × 10".into())),
        (root(0), root(1)),
    ];
    for (left, right) in pairs {
        let names = [left.1.clone(), right.1.clone()];
        let ranks = super::ranks(2);
        let errors = on_all(&ranks, |rank| {
            let group = super::group(rank, 0, "main");
            group.barrier(&stream()).unwrap();
            (if rank.rank == 0 { &left.0 } else { &right.0 })(&group).unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate() {
            let Error::OutOfStep { peer, theirs, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(*peer, 1 - rank);
            assert!(theirs.starts_with(&names[1 - rank]), "{error}");
            assert!(
                theirs.contains("(call 1 of group main, at ") && theirs.contains("failures.rs:"),
                "{error}"
            );
            assert_eq!(error.exit_code(), 78);
        }
    }
}

#[test]
fn groups_made_in_different_orders_are_out_of_step() {
    let ranks = super::ranks(2);
    let errors = on_all(&ranks, |rank| {
        let group = super::group(rank, 0, ["main", "gradients"][rank.rank]);
        group.barrier(&stream()).unwrap_err().to_string()
    });
    assert!(
        errors[0].contains("rank 1 is at barrier (call 0 of group gradients"),
        "{}",
        errors[0]
    );
}

#[test]
fn the_absent_are_all_named_by_their_global_rank() {
    let segment = Segment::in_process(4).unwrap();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let wait = |local: usize| {
            let shared =
                Shared::new(segment.clone(), 2, local, vec![10, 11, 12, 13], false, None).unwrap();
            let group = Group::new(std::sync::Arc::new(shared), "main", SHORT);
            group
                .all_reduce(&zeros(100_000, DType::BF16), Reduce::Sum, &stream())
                .unwrap_err()
                .to_string()
        };
        let all: Vec<_> = [0, 2].map(|local| scope.spawn(move || wait(local))).into();
        all.into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for error in errors {
        assert!(
            error.contains("ranks 11 and 13 did not arrive within 20 s"),
            "{error}"
        );
        assert!(
            error.contains("all_reduce sum of bf16[100000] on cpu (call 0 of group main"),
            "{error}"
        );
    }
}

/// Runs one call on three ranks, of which rank 1 stops at point number `places` within it. Returns
/// the errors of the others.
fn stopped_at(places: u64, make: &(dyn Fn(&Group) -> Result<()> + Sync)) -> Vec<Option<Error>> {
    let segment = Segment::in_process_as(layout::Layout::tiny(3)).unwrap();
    std::thread::scope(|scope| {
        let run = |rank: usize, delays: Option<Delays>| {
            let shared =
                Shared::new(segment.clone(), 0, rank, vec![0, 1, 2], false, delays).unwrap();
            make(&Group::new(std::sync::Arc::new(shared), "main", SHORT)).err()
        };
        let (others_end, end) = std::sync::mpsc::channel();
        let delays = Delays::stopping(places, end);
        scope.spawn(move || run(1, Some(delays)));
        let others = [0, 2].map(|rank| scope.spawn(move || run(rank, None)));
        let errors = others.map(|thread| thread.join().unwrap());
        drop::<std::sync::mpsc::Sender<()>>(others_end);
        errors.into()
    })
}

#[test]
fn a_rank_that_stops_in_the_middle_is_the_one_that_is_named() {
    let calls: [(&str, Make); 5] = [
        (
            "all_reduce",
            Box::new(|group| group.all_reduce(&zeros(500, DType::F32), Reduce::Sum, &stream())),
        ),
        (
            "reduce_scatter",
            Box::new(|group| group.reduce_scatter(&zeros(600, DType::F32), Reduce::Sum, &stream())),
        ),
        (
            "all_gather",
            Box::new(|group| group.all_gather(&zeros(600, DType::F32), &stream())),
        ),
        (
            "broadcast from it",
            Box::new(|group| group.broadcast(&zeros(400, DType::F32), 1, &stream())),
        ),
        (
            "broadcast to it",
            Box::new(|group| group.broadcast(&zeros(400, DType::F32), 0, &stream())),
        ),
    ];
    std::thread::scope(|scope| {
        for (name, make) in &calls {
            for places in (0..27).step_by(3) {
                scope.spawn(move || {
                    let errors = stopped_at(places, make);
                    for error in errors.iter().flatten() {
                        let Error::Timeout { missing, .. } = error else {
                            panic!("{name} at {places}: {error}")
                        };
                        assert_eq!(missing, &[1], "{name} at {places}: {error}");
                    }
                    // Beyond the last place that the others wait for there is nothing to see.
                    assert!(
                        places > 8 || errors.iter().any(Option::is_some),
                        "{name} at {places}"
                    );
                });
            }
        }
    });
}

#[test]
fn an_abort_wakes_all_waiters_with_the_first_cause() {
    let ranks = super::ranks(4);
    let errors = on_all(&ranks, |rank| {
        if rank.rank == 3 {
            // Sleep: the others wait by then; one that begins later has the same error.
            std::thread::sleep(Duration::from_millis(30));
            let cause = Cause {
                rank: 3,
                host: "here".into(),
                exit_code: 76,
                text: "loss is NaN".into(),
            };
            assert!(rank.board().fail(&cause));
            return None;
        }
        let (group, tensor) = (group(rank, 0, "main"), zeros(5, DType::F32));
        let error = match rank.rank {
            0 => group.barrier(&stream()),
            1 => group.receive(&tensor, 3, &stream()),
            _ => group.all_reduce(&zeros(1 << 20, DType::F32), Reduce::Sum, &stream()),
        };
        Some((error.unwrap_err(), Instant::now(), group))
    });
    for (error, _, group) in errors.iter().flatten() {
        assert!(matches!(error, Error::PeerFailed(_)) && error.exit_code() == 76);
        assert_eq!(
            error.to_string(),
            "ended because of rank 3 on here: loss is NaN"
        );
        assert!(matches!(
            group.barrier(&stream()).unwrap_err(),
            Error::PeerFailed(_)
        ));
    }
}

/// Runs `wake`, which must wake a thread that sleeps on this counter: its sleep has no other end.
fn assert_wakes(counter: Counter<'_>, wake: impl FnOnce()) {
    let (value, thread) = (counter.value.load(Ordering::SeqCst), AtomicI32::new(0));
    let sleep = || {
        let end = libc::timespec {
            tv_sec: LONG.as_secs() as libc::time_t,
            tv_nsec: 0,
        };
        counter.sleepers.fetch_add(1, Ordering::SeqCst);
        // SAFETY: gettid only returns a number. The word lives while it is borrowed, and the
        // kernel only reads it and the time.
        let result = unsafe {
            thread.store(libc::gettid(), Ordering::SeqCst);
            let (word, end) = (counter.value.as_ptr(), &raw const end);
            libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, value, end)
        };
        counter.sleepers.fetch_sub(1, Ordering::SeqCst);
        (result, std::io::Error::last_os_error())
    };
    let is_asleep = || {
        let path = format!("/proc/self/task/{}/stat", thread.load(Ordering::SeqCst));
        std::fs::read_to_string(path).is_ok_and(|text| text.contains(") S "))
    };
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(sleep);
        while !is_asleep() && !sleeper.is_finished() {
            std::thread::yield_now();
        }
        wake();
        let (result, error) = sleeper.join().unwrap();
        assert_eq!(result, 0, "{error}");
    });
}

/// A waiter's sleeps end by themselves, too. Another sleeper on the counter that it sleeps on shows
/// that it need not wait for that.
#[test]
fn a_waiter_is_woken_when_the_last_rank_arrives() {
    let segment = Segment::in_process(2).unwrap();
    let ranks = threads::ranks(&segment, None);
    let arrive = |rank: usize| group(&ranks[rank], 0, "main").barrier(&stream()).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| arrive(0));
        let counter = loop {
            let at = ranks[0].board().asleep(0, 0).load(Ordering::SeqCst) as usize;
            let [value, sleepers] = [at, at + 4].map(|at| segment.u32_at(at));
            if at != 0 && sleepers.load(Ordering::SeqCst) == 1 {
                break Counter { value, sleepers };
            }
            assert!(!waiter.is_finished(), "it never sleeps");
            std::thread::yield_now();
        };
        assert_wakes(counter, || arrive(1));
        waiter.join().unwrap();
    });
}

#[test]
fn a_group_is_unusable_after_an_error_and_says_so() {
    let ranks = super::ranks(2);
    let shared = std::sync::Arc::new(ranks[0].collective(0).unwrap());
    let group = Group::new(shared, "main", Duration::from_millis(5));
    assert!(matches!(
        group.barrier(&stream()).unwrap_err(),
        Error::Timeout { .. }
    ));
    let error = group.send(&zeros(1, DType::U8), 1, &stream()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("group main cannot be used after an error: barrier (call 0"),
        "{error}"
    );
    assert_eq!(error.exit_code(), 77);
    // Another group still works.
    on_all(&ranks, |rank| {
        super::group(rank, 1, "other").barrier(&stream()).unwrap()
    });
}

#[test]
fn a_group_is_unusable_after_a_panic_and_says_so() {
    #[derive(Debug)]
    struct Panics;
    impl Collective for Panics {
        fn transport(&self) -> &'static str {
            "none"
        }
        fn rank(&self) -> usize {
            0
        }
        fn size(&self) -> usize {
            2
        }
        fn run(&self, _: &[Call<'_>]) -> Result<()> {
            panic!("as asked")
        }
    }
    let group = Group::new(Arc::new(Panics), "main", LONG);
    let barrier = std::panic::AssertUnwindSafe(|| group.barrier(&stream()));
    assert!(std::panic::catch_unwind(barrier).is_err());
    let error = group.barrier(&stream()).unwrap_err().to_string();
    assert!(
        error.contains("group main cannot be used after a panic"),
        "{error}"
    );
}

#[test]
fn a_rank_that_has_left_is_not_waited_for() {
    let ranks = super::ranks(2);
    let errors = on_all(&ranks, |rank| {
        let group = super::group(rank, 0, "main");
        group.barrier(&stream()).unwrap();
        if rank.rank == 1 {
            // Sleep: the other one waits by then, or begins later.
            std::thread::sleep(Duration::from_millis(5));
            rank.board().leave(1);
            return String::new();
        }
        group.barrier(&stream()).unwrap_err().to_string()
    });
    assert!(
        errors[0].contains("rank 1 is at its end: it left in order"),
        "{}",
        errors[0]
    );
}

#[test]
fn a_channel_is_joined_once() {
    let ranks = super::ranks(1);
    let _group = group(&ranks[0], 3, "main");
    let error = ranks[0].collective(3).unwrap_err().to_string();
    assert!(
        error.contains("channel 3: rank 0 already has one there"),
        "{error}"
    );
}

#[test]
fn another_message_than_expected_is_refused() {
    let ranks = super::ranks(2);
    let results = on_all(&ranks, |rank| {
        let group = super::group(rank, 0, "main");
        if rank.rank == 0 {
            return group.send(&zeros(3, DType::F32), 1, &stream());
        }
        group.receive(&zeros(3, DType::I32), 0, &stream())
    });
    assert!(results[0].is_ok());
    let error = results[1].as_ref().unwrap_err().to_string();
    assert!(
        error.contains("receive from rank 0 of i32[3] on cpu"),
        "{error}"
    );
    assert!(
        error.contains("rank 0 is at send to rank 1 of f32 × 3"),
        "{error}"
    );
}

#[test]
fn a_waiting_rank_uses_no_core() {
    fn used() -> Duration {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel writes the time there and nothing else.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
    let ranks = super::ranks(2);
    let spent = on_all(&ranks, |rank| {
        let group = super::group(rank, 0, "main");
        group.barrier(&stream()).unwrap();
        if rank.rank == 1 {
            // Sleep: the other one would spin meanwhile if it did not sleep.
            std::thread::sleep(Duration::from_millis(400));
        }
        let before = used();
        group.barrier(&stream()).unwrap();
        used() - before
    });
    // 20 µs of spinning and eight wake-ups: 5 ms leaves room for a slow machine, and is far from
    // 400.
    assert!(spent[0] < Duration::from_millis(5), "{spent:?}");
}

#[test]
fn a_tensor_in_use_is_refused_without_waiting() {
    let ranks = super::ranks(1);
    let (group, tensor) = (group(&ranks[0], 0, "main"), zeros(4, DType::F32));
    let result = tensor
        .with_slice::<f32, _>(|_| group.all_gather(&tensor, &stream()))
        .unwrap();
    assert!(matches!(result.unwrap_err(), Error::Tensor(_)));
    assert!(group.all_gather(&tensor, &stream()).is_ok());
}

use super::*;

#[test]
fn counters_compare_across_the_wrap() {
    for (value, target, past) in [
        (0, 0, true),
        (1, 0, true),
        (0, 1, false),
        (3, u32::MAX - 2, true),
        (u32::MAX, 2, false),
        (u32::MAX, u32::MAX, true),
    ] {
        assert_eq!(is_past(value, target), past, "{value} {target}");
    }
}

/// That it is woken for this: `a_waiter_is_woken_when_the_last_rank_arrives`.
#[test]
fn a_sleeper_is_freed_where_the_counter_wraps() {
    let (value, sleepers) = (AtomicU32::new(u32::MAX), AtomicU32::new(0));
    let counter = Counter {
        value: &value,
        sleepers: &sleepers,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !counter.reached(0) {
                counter.sleep(0, SLEEP_MAX);
            }
        });
        while sleepers.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        counter.raise(0);
    });
    assert_eq!(sleepers.into_inner(), 0);
}

#[test]
fn a_sleep_ends_by_itself() {
    let (value, sleepers) = (AtomicU32::new(0), AtomicU32::new(0));
    let counter = Counter {
        value: &value,
        sleepers: &sleepers,
    };
    let started = Instant::now();
    counter.sleep(1, Duration::from_secs(3600));
    assert!(started.elapsed() < Duration::from_secs(60));
    assert!(!counter.spin(1, Duration::from_micros(5)));
}

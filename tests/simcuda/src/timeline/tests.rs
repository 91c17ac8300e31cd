//! Engines, and the contents of the timeline file.

use super::*;

#[test]
fn an_engine_does_one_thing_at_a_time_and_fills_its_gaps() {
    let mut engine = Engine::default();
    assert_eq!(engine.take(100, 50), 100);
    assert_eq!(engine.take(100, 50), 150, "behind the first");
    assert_eq!(engine.take(0, 100), 0, "just long enough");
    assert_eq!(engine.take(0, 1), 200);
    assert_eq!(engine.take(500, 10), 500);
    assert_eq!(engine.take(0, 300), 510, "no gap is long enough");
    assert_eq!(engine.take(0, 299), 201);
    assert_eq!(engine.busy, BTreeMap::from([(0, 810)]));
}

#[test]
fn an_engine_forgets_the_oldest_stretches_and_counts_them_as_busy() {
    let mut engine = Engine::default();
    for stretch in 0..STRETCHES_MAX as u64 + 10 {
        assert_eq!(engine.take(10 * stretch, 1), 10 * stretch);
    }
    assert_eq!(engine.busy.len(), STRETCHES_MAX);
    assert_eq!(engine.take(0, 1), 91, "the tenth stretch ends there");
}

/// What a run of the bench lists: what, stream, start and end in units of a piece of work of the
/// bench.
fn listed(give: impl FnOnce(&crate::stream::tests::Bench)) -> Vec<(String, u64, u64, u64)> {
    use crate::stream::tests::{SUCCESS, TOUCH_NS, bench, config};
    static RUNS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let run = RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("simcuda-timeline-{}-{run}", std::process::id()));
    let bench = bench(crate::config::Config {
        timeline: Some(path.clone()),
        ..config(run)
    });
    give(&bench);
    assert_eq!(crate::stream::calls::cuCtxSynchronize(), SUCCESS);
    let text = std::fs::read_to_string(&path).expect("the list was written");
    std::fs::remove_file(&path).expect("the list is there");
    let field = |line: &str, name: &str| {
        let rest = line
            .split_once(&format!("\"{name}\":"))
            .expect("all lines have all fields")
            .1;
        rest.trim_start_matches('"')
            .split(['"', ',', '}'])
            .next()
            .expect("a field has a value")
            .to_owned()
    };
    let number = |line: &str, name: &str| field(line, name).parse::<u64>().expect("a number");
    let mut all: Vec<_> = text
        .lines()
        .map(|line| {
            let (start, end) = (number(line, "start_ns"), number(line, "end_ns"));
            (
                field(line, "what"),
                number(line, "stream"),
                start / TOUCH_NS,
                end / TOUCH_NS,
            )
        })
        .collect();
    all.sort_by_key(|entry| (entry.2, entry.1));
    all
}

#[test]
fn kernels_of_one_device_follow_one_another_and_copies_go_beside_them() {
    for _ in 0..10 {
        let all = listed(|bench| {
            let (first, second) = (bench.stream(), bench.stream());
            bench.run_all(first, &["kernel a", "kernel a"]);
            bench.run_all(second, &["cuMemcpy b", "cuMemcpy b", "cuMemcpy b"]);
        });
        let times: Vec<(u64, u64, u64)> = all
            .iter()
            .map(|(_, stream, start, end)| (*stream, *start, *end))
            .collect();
        assert_eq!(
            times,
            [(0, 0, 1), (1, 0, 1), (0, 1, 2), (1, 1, 2), (1, 2, 3)]
        );
        let all = listed(|bench| {
            let (first, second) = (bench.stream(), bench.stream());
            bench.run_all(first, &["kernel a", "kernel a"]);
            bench.run_all(second, &["kernel b", "kernel b"]);
        });
        let busy: Vec<(u64, u64)> = all
            .iter()
            .map(|(_, _, start, end)| (*start, *end))
            .collect();
        assert_eq!(
            busy,
            [(0, 1), (1, 2), (2, 3), (3, 4)],
            "in any order, without gaps"
        );
    }
}

#[test]
fn work_starts_after_the_events_and_host_waits_before_it() {
    let all = listed(|bench| {
        let (first, second, third) = (bench.stream(), bench.stream(), bench.stream());
        bench.run_all(first, &["cuMemcpy a", "cuMemcpy a"]);
        bench.order(first, second);
        bench.run(second, "cuMemcpy b");
        assert_eq!(
            crate::stream::calls::cuStreamSynchronize(first),
            crate::stream::tests::SUCCESS
        );
        bench.run(third, "cuMemcpy c");
    });
    let find = |name: &str| {
        all.iter()
            .find(|entry| entry.0 == name)
            .map(|entry| (entry.2, entry.3))
    };
    assert_eq!(
        (find("cuMemcpy b"), find("cuMemcpy c")),
        (Some((2, 3)), Some((2, 3)))
    );
}

#[test]
fn a_node_of_a_graph_stands_under_the_stream_that_it_was_captured_in() {
    use crate::graph::calls::{cuGraphInstantiateWithFlags, cuGraphLaunch};
    use crate::graph::capture_calls::{cuStreamBeginCapture_v2, cuStreamEndCapture};
    use crate::stream::tests::{SUCCESS, got};
    let all = listed(|bench| {
        let (first, second, third) = (bench.stream(), bench.stream(), bench.stream());
        assert_eq!(cuStreamBeginCapture_v2(first, 1), SUCCESS);
        bench.order(first, second);
        bench.run(first, "kernel a");
        bench.run(second, "cuMemcpy b");
        bench.order(second, first);
        let graph = got(|graph| cuStreamEndCapture(first, graph));
        let executable = got(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
        assert_eq!(cuGraphLaunch(executable, third), SUCCESS);
    });
    assert_eq!(
        all,
        [
            ("kernel a".to_owned(), 0, 0, 1),
            ("cuMemcpy b".to_owned(), 1, 0, 1)
        ]
    );
}

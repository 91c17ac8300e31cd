//! `ddp-train bench`: one line of JSON, with what was promised in it.

use serde_json::Value;

use crate::job::{Ended, Folder, all_at_once};
use crate::record::{fields, number};

/// The one line on standard output.
#[track_caller]
fn line(ended: &Ended) -> Value {
    ended.assert_well();
    assert_eq!(ended.stdout.lines().count(), 1, "{ended}");
    let line: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended}"));
    assert_eq!((&line["system"], &line["version"]), (&"ddp-train".into(), &env!("CARGO_PKG_VERSION").into()));
    line
}

/// Alone, and on two ranks where there is MPI.
fn on_one_and_two(words: &str, check: impl Fn(&Value, usize) + Sync) {
    all_at_once([1, if cfg!(feature = "mpi") { 2 } else { 1 }], |ranks| {
        let folder = Folder::new("bench");
        let job = if ranks == 1 { folder.alone(words) } else { folder.together(words) };
        let line = line(&job.run());
        assert_eq!(line["ranks"], ranks);
        check(&line, ranks);
        assert!(folder.tree().is_empty(), "a bench writes nothing");
    });
}

#[test]
fn bench_mlp_prints_one_line_with_the_promised_fields() {
    let words = "bench mlp --layers 16,32,4 --batch 48 --threads 1 --seconds 0.1 --rounds 3 --dtype f32 --device cpu";
    on_one_and_two(words, |line, ranks| {
        let promised =
            "system version layers batch ranks threads dtype device step_ms samples_per_s first_step_s peak_mb";
        let missing: Vec<_> = promised.split(' ').filter(|field| !fields(line).contains(field)).collect();
        assert!(missing.is_empty(), "{missing:?}: {line}");
        assert_eq!((&line["layers"], &line["batch"], &line["threads"]), (&"16,32,4".into(), &48.into(), &1.into()));
        assert_eq!((&line["dtype"], &line["device"]), (&"f32".into(), &"cpu".into()));
        for field in ["step_ms", "samples_per_s", "first_step_s", "peak_mb", "steps"] {
            assert!(number(line, field) > 0.0, "{field}: {line}");
        }
        // Milliseconds are rounded to a ten-thousandth, rows of a second to one.
        let (step_ms, rate) = (number(line, "step_ms"), number(line, "samples_per_s"));
        let slack = 0.5 + rate * 0.5e-4 / step_ms;
        assert!((rate - 48e3 / step_ms).abs() <= slack * 1.01, "{line}");
        assert_eq!(line["hidden_share"].is_null(), ranks == 1, "{line}");
    });
}

#[test]
fn the_share_that_is_hidden_is_that_of_an_overlap() {
    let words = "bench mlp --layers 64,64,64,4 --batch 48 --threads 1 --seconds 0.1 --overlap on --bucket-mb 0.02";
    on_one_and_two(words, |line, ranks| {
        assert_eq!(line["overlap"], ranks > 1, "{line}");
        assert!(ranks == 1 || (0.0..=1.0).contains(&number(line, "hidden_share")), "{line}");
        assert!(number(line, "buckets") > 1.0, "{line}");
    });
}

#[test]
fn bench_allreduce_prints_one_line_with_the_promised_fields() {
    on_one_and_two("bench allreduce --mb 0.25 --seconds 0.1 --threads 1", |line, ranks| {
        assert_eq!((&line["bytes"], &line["dtype"], &line["device"]), (&250_000.into(), &"f32".into(), &"cpu".into()));
        let transport = if ranks == 1 { "alone" } else { "shared memory" };
        assert_eq!((&line["bench"], &line["transport"]), (&"allreduce".into(), &transport.into()));
        assert!(number(line, "repetitions") > 0.0, "{line}");
        assert!(number(line, "ms") >= number(line, "ms_best"), "{line}");
        assert!(ranks == 1 || number(line, "ms_best") > 0.0 && number(line, "bus_gb_per_s") > 0.0, "{line}");
    });
}

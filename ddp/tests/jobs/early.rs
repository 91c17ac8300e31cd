//! Runs that end early, after evaluations without progress (`--stop-after`): at the same step on
//! any number of ranks, also if resumed or after a lost rank.

use serde_json::Value;

use crate::resuming::saved;
use crate::support::job::{Ended, Folder};
use crate::support::metrics_log::{model_bytes, number};

/// 300 steps, many more than the held-out AUC grows.
const RUN: &str = "--data synthetic:classification,classes=2,features=6,rows=120,held-out=90,noise=2 \
                   --hidden 32 --batch-size 24 --lr 0.01 --steps 300 --eval-every 2 --checkpoint-every 1 \
                   --best auc --same-bits 6 --threads 1 --out OUT";
/// The evaluations without progress that end it.
const STOP: &str = "--stop-after 3";

/// What must be the same: evaluations, the classes at the last one, and the model after `last`.
type Left = (Vec<Value>, Value, Vec<u8>);

fn left(folder: &Folder, last: u64) -> Left {
    let log = folder.metrics_log();
    let evals = log.all("eval").into_iter().cloned().collect();
    let confusion = log.all("confusion")[0].clone();
    (evals, confusion, model_bytes(&folder.out(), last))
}

/// The step after which a run has ended early, and that of its best evaluation.
#[track_caller]
fn ended_early(folder: &Folder, ended: &Ended) -> (u64, u64) {
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let log = folder.metrics_log();
    let aucs: Vec<f64> = (log.all("eval").iter())
        .map(|it| number(it, "auc"))
        .collect();
    let most = aucs.iter().copied().fold(0.0, f64::max);
    let best = 2 * (1 + aucs.iter().position(|auc| *auc == most).unwrap()) as u64;
    let last = 2 * aucs.len() as u64;
    assert_eq!(last, best + 6, "{aucs:?}");
    let reason = format!(
        "stopped early after step {last} of 300: the held-out AUC has not become better \
         (--stop-after 3)"
    );
    let end = log.end().unwrap();
    assert_eq!(
        (&end["outcome"], &end["reason"], &end["exit_code"]),
        (&"early".into(), &Value::from(&*reason), &0.into())
    );
    assert!(ended.stderr.contains(&reason), "{ended}");
    let saved = saved(folder);
    assert!(
        saved.contains(&best) && saved.last() == Some(&last),
        "{saved:?}"
    );
    (last, best)
}

#[test]
fn a_run_stops_early_after_the_same_step_on_any_ranks_resumed_or_with_a_lost_one() {
    let run = format!("{RUN} {STOP}");
    let alone = Folder::new("early-alone");
    let ended = alone.alone(&run).run();
    let (last, best) = ended_early(&alone, &ended);
    let expected = left(&alone, last);

    let three = Folder::new("early-three");
    let ended = three.started(3, &run).run();
    assert_eq!(ended_early(&three, &ended), (last, best));
    assert!(left(&three, last) == expected, "{ended}");

    // Killed between the second and the third evaluation without progress.
    let resumed = Folder::new("early-resumed");
    let fault = format!("0:forward:{last}:kill");
    resumed.alone(&run).env("DDP_TEST_FAULT", &fault).run();
    let ended = resumed.started(2, &format!("{run} --resume auto")).run();
    assert_eq!(ended_early(&resumed, &ended), (last, best));
    assert!(left(&resumed, last) == expected, "{ended}");

    // Rank 0 is lost in the evaluation that ends the run.
    let lost = Folder::new("early-lost");
    let fault = format!("0:evaluation:{last}:kill");
    let words = format!("{run} --min-ranks 1");
    let ended = lost.started(3, &words).env("DDP_TEST_FAULT", &fault).run();
    assert_eq!(ended_early(&lost, &ended), (last, best));
    assert_eq!(lost.metrics_log().all("ranks").len(), 1, "{ended}");
    assert!(left(&lost, last) == expected, "{ended}");

    // The report, `eval` and a resume know it.
    let report = std::fs::read_to_string(alone.out().join("report.html")).unwrap();
    let parts = [
        &*format!("stopped early after step {last}"),
        "✓</span> done",
        "<dt>AUC</dt>",
    ];
    assert!(parts.iter().all(|part| report.contains(part)), "{report}");
    let data = RUN.split(' ').nth(1).unwrap();
    let ended = alone
        .alone(&format!("eval --checkpoint OUT --data {data}"))
        .run();
    let found = format!("(the best by validation AUC), after step {best}\n");
    assert!(
        ended.stdout.contains(&found) && ended.stdout.contains("%, AUC 0."),
        "{ended}"
    );
    let before = alone.tree();
    let ended = alone.alone(&format!("{run} --resume auto")).run();
    ended.assert_well();
    let text = "has stopped early; help: a larger --stop-after continues it";
    assert!(
        ended.stderr.contains(text) && alone.tree() == before,
        "{ended}"
    );
    let ended = alone
        .alone(&format!("{RUN} --stop-after 4 --resume auto"))
        .run();
    ended.assert_well();
    let evals = alone.metrics_log().all("eval").len() as u64;
    assert!(
        2 * evals > last && alone.metrics_log().all("resume").len() == 1,
        "{ended}"
    );
}

/// Of the figures of `--best` only the AUC decided in a test.
#[test]
fn the_best_step_is_that_of_the_figure_that_decides() {
    for by in ["accuracy", "balanced"] {
        let folder = Folder::new("best-by");
        let words = RUN
            .replace("--best auc", &format!("--best {by}"))
            .replace("--steps 300", "--steps 40");
        folder.alone(&words).run().assert_well();
        let log = folder.metrics_log();
        let step_of = |name: &str, sign: f64| {
            let all = log.all("eval");
            let value = |it: &&&Value| sign * number(it, name);
            let least = all.iter().min_by(|a, b| value(a).total_cmp(&value(b)));
            number(least.unwrap(), "step")
        };
        let field = by.replace("balanced", "balanced_accuracy");
        let best = step_of(&field, -1.0);
        assert_ne!(best, step_of("loss", 1.0), "{by}: the loss would do");
        let data = RUN.split(' ').nth(1).unwrap();
        let ended = folder
            .alone(&format!("eval --checkpoint OUT --data {data}"))
            .run();
        let chosen = format!("), after step {best}\n");
        assert!(ended.stdout.contains(&chosen), "{by}: {ended}");
    }
}

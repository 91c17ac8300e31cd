//! The page itself: no other script runs in it, and it is small.

use super::*;

#[test]
fn texts_are_shown_and_never_run() {
    let evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{numbers}}";
    let mut start = start();
    start["config"]["out"] = json!(evil);
    start["config"][evil] = json!(evil);
    start["versions"][evil] = json!(evil);
    start["data"] = json!(evil);
    start["devices"] = json!([evil, evil]);
    let amount = json!({evil: {"count": 1, "bytes": 8}});
    let rank = json!({"rank": 0, "devices": [evil], "rows": 1, "per_step": amount, "phases": {evil: amount}});
    let lines = [
        start,
        step(1),
        json!({"event": "resume", "step": 1, "overridden": [evil]}),
        json!({"event": "confusion", "step": 1, "names": [evil, evil], "rows": [1, 1], "predicted": [2, 0], "right": [1, 0], "counts": [[1, 0], [1, 0]],
               "mistakes": null}),
        json!({"event": "placement", "steps": 1, "ranks": [rank, rank], "differences": [{"kind": evil, "at": evil, "amounts": [null]}],
               "hints": [{"text": evil, "ranks": [0], "count": 1}]}),
        end(evil, 70),
    ];
    let scratch = Scratch::new();
    write(
        scratch.path(),
        &lines
            .iter()
            .map(|line| format!("{line}\n"))
            .collect::<String>(),
    );
    let page = fs::read_to_string(make(scratch.path()).unwrap()).unwrap();
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert!(
        !page.contains("alert(1)</script>") && !page.contains("<img src=x"),
        "{page}"
    );
    // The page's own two: its numbers, and its program.
    assert_eq!(
        (
            page.matches("<script").count(),
            page.matches("</script>").count()
        ),
        (2, 2)
    );
    assert!(
        !page.contains("http://") && !page.contains("https://"),
        "it would ask the network"
    );
}

#[test]
fn the_page_lets_no_other_script_run() {
    let page = report(&[start()]);
    let (_, policy) = page
        .split_once("Content-Security-Policy\" content=\"")
        .unwrap();
    let (policy, _) = policy.split_once("\">").unwrap();
    let hash = policy
        .strip_prefix("default-src 'none'; script-src 'sha256-")
        .unwrap();
    let (hash, _) = hash.split_once('\'').unwrap();
    let (_, script) = page.rsplit_once("<script>").unwrap();
    let (script, _) = script.split_once("</script>").unwrap();
    let scratch = Scratch::new();
    let output = |program: &str, input: &str| {
        let file = scratch.path().join(program);
        fs::write(&file, input).unwrap();
        let decode = (program == "base64").then_some("--decode");
        let mut command = Command::new(program);
        command.args(decode).arg(&file).output().unwrap().stdout
    };
    let allowed = output("base64", hash)
        .iter()
        .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
    let own = String::from_utf8(output("sha256sum", script)).unwrap();
    assert!(
        own.starts_with(&allowed) && allowed.len() == 64,
        "page.html: {own}"
    );
}

#[test]
fn a_page_depends_on_its_log_alone_not_on_folders_or_times() {
    let scratch = Scratch::new();
    let log: String = [start(), step(1), step(2), end("done", 0)]
        .iter()
        .map(|line| format!("{line}\n"))
        .collect();
    let other = scratch.path().join("another");
    fs::create_dir(&other).unwrap();
    let [page, later] = [scratch.path(), &other].map(|folder| {
        write(folder, &log);
        if folder == other {
            let events = fs::File::options()
                .write(true)
                .open(folder.join(EVENTS_FILE));
            events.unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        }
        fs::read_to_string(make(folder).unwrap()).unwrap()
    });
    assert!(page == later);
}

#[test]
fn a_long_run_makes_a_small_page() {
    let scratch = Scratch::new();
    let mut log = format!("{}\n", start());
    for number in 1..=100_000 {
        log += &format!("{}\n", step(number));
    }
    write(scratch.path(), &log);
    let page = fs::metadata(make(scratch.path()).unwrap()).unwrap();
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
}

#[test]
fn simple_models_are_beside_the_figure_and_predictions_against_labels_are_drawn() {
    let eval = json!({"event": "eval", "step": 1, "loss": 0.1, "r2": 0.95});
    let others = json!({"event": "baselines", "step": 1, "model": 0.95, "figure": "r2", "constant": -0.25, "linear": 0.9});
    let rows = json!({"event": "predictions", "step": 1, "rows": [[1.0, 1.5], [3.0, 2.5]]});
    let page = report(&[start(), step(1), eval.clone(), others, rows]);
    let note = "of the held-out rows, a linear model: 0.9000, the mean of the labels: −0.2500";
    assert_in_order(
        &page,
        &[
            ">R²<",
            "0.9500",
            note,
            "2 held-out rows",
            "<svg class=\"answers\"",
        ],
    );
    assert_eq!(page.matches("<circle").count(), 2);
    // A forged log.
    for rows in [
        json!([["<b>", 1.0]]),
        json!(7),
        json!([]),
        json!([[1.0, null]]),
    ] {
        let rows = json!({"event": "predictions", "step": 1, "rows": rows});
        let others = json!({"event": "baselines", "figure": "<b>", "constant": "<b>"});
        let page = report(&[start(), step(1), eval.clone(), others, rows]);
        assert!(
            !page.contains("<svg class") && !page.contains("<b>"),
            "{page}"
        );
    }
}

/// Settings whose defaults follow from others were shown as changed.
#[test]
fn settings_that_a_run_has_chosen_are_not_shown_as_changed() {
    let mut start = start();
    start["changed"] = json!(["out", "lr"]);
    start["config"]["eval-every"] = json!(7);
    let page = report(&[start]);
    let (_, settings) = page.split_once("<h2 id=\"settings-title\">").unwrap();
    let (changed, rest) = settings.split_once("<details>").unwrap();
    assert!(
        changed.contains(">lr<") && changed.contains("0.5"),
        "{changed}"
    );
    assert!(
        !changed.contains("eval-every") && rest.contains("eval-every"),
        "{rest}"
    );
}

#[test]
fn a_picture_has_the_first_two_charts_and_their_round_numbers() {
    let scratch = Scratch::new();
    let eval = json!({"event": "eval", "step": 2, "loss": 1.25, "accuracy": 0.5});
    let lines = [start(), step(1), step(2), eval].map(|line| format!("{line}\n"));
    write(scratch.path(), &lines.concat());
    let (folders, svg) = ([scratch.path().to_path_buf()], scratch.path().join("a.svg"));
    crate::report::report(&folders, None, Some(&svg), &mut |_| Ok(())).unwrap();
    let text = fs::read_to_string(&svg).unwrap();
    assert_in_order(
        &text,
        &[
            ">Loss<",
            ">1<",
            ">2<",
            ">held out<",
            ">training<",
            ">Accuracy<",
            ">50%<",
        ],
    );
    assert_eq!(text.matches("stroke-width=\"2\"").count(), 3, "{text}");
    assert!(!scratch.path().join(REPORT_FILE).exists());
}

//! Logs that are cut, changed or of older versions.

use super::*;

/// `compare one two`, after `change` of B's log.
fn changed_log(folder: &Folder, change: impl Fn(&str) -> String) -> Ended {
    let log = folder.path().join("two/metrics.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, change(&text)).unwrap();
    let ended = compare(folder);
    fs::write(&log, text).unwrap();
    ended
}

#[test]
fn a_log_that_is_cut_damaged_or_lost_is_not_called_the_same_for_nothing() {
    // A checkpoint's line would come between any two steps.
    let flags = "--schedule constant --warmup-steps 0 --checkpoint-every 0";
    let words = SMALL.replace("--steps 40", flags);
    let whole = format!("{words} --steps 12");
    let (folder, _) = pair((1, &whole, ""), (1, &whole, ""));
    let cut = changed_log(&folder, |text| {
        let lines: Vec<_> = text.lines().take(6).collect();
        lines.join("\n") + "\n"
    });
    cut.assert_well();
    for expected in [
        "the same in all 5 steps that both logged",
        "7 steps that only A logged: not compared",
    ] {
        assert!(cut.stdout.contains(expected), "{cut}");
    }
    let damaged = changed_log(&folder, |text| {
        text.replacen(
            "}}\n{\"event\":\"step\",\"step\":8,",
            "}\n{\"event\":\"step\",\"step\":8,",
            1,
        )
    });
    let text = damaged.assert_fails(65);
    assert!(
        text.contains("line 8 of metrics.jsonl is not an event"),
        "{text}"
    );
    // A step that is JSON, and no step.
    let odd = changed_log(&folder, |text| {
        text.replacen("\"loss\":", "\"loss\":\"x\",\"was\":", 1)
    });
    let text = odd.assert_fails(65);
    assert!(
        text.contains("line 2 of metrics.jsonl is no step: "),
        "{text}"
    );
    // Written by another program, with spaces.
    let spaced = changed_log(&folder, |text| {
        text.replace("\"event\":\"step\"", "\"event\": \"step\"")
    });
    spaced.assert_well();
    assert!(
        spaced.stdout.contains("the same in all 12 steps"),
        "{spaced}"
    );
    // Without its log a run that is resumed does not know its initial weights.
    for (name, steps) in [("one", 16), ("two", 16)] {
        if name == "two" {
            fs::remove_file(folder.path().join("two/metrics.jsonl")).unwrap();
        }
        let words = format!("{words} --steps {steps} --resume auto");
        train(&folder, name, (1, &words, ""));
    }
    let value = compared(&folder);
    assert_eq!(value["same"], true, "{value}");
    assert_eq!(value["steps"], 4, "{value}");
    assert_eq!(value["steps_only_in_a"], 12, "{value}");
}

#[test]
fn logs_of_older_versions_are_compared_by_their_losses() {
    let folder = Folder::new("older");
    for (name, flags) in [("one", ""), ("two", "--seed 1")] {
        train(&folder, name, (1, &format!("{SMALL} {flags}"), ""));
        let path = folder.path().join(name).join("metrics.jsonl");
        let older = |line: &str| {
            let mut event: Value = serde_json::from_str(line).unwrap();
            let fields = event.as_object_mut().unwrap();
            fields.remove("digests");
            fields.remove("initial_weights");
            let kind = fields.remove("event").unwrap();
            let rest = event.to_string().split_off(1);
            format!("{{\"event\":{kind},{rest}\n")
        };
        let log = fs::read_to_string(&path).unwrap();
        fs::write(&path, log.lines().map(older).collect::<String>()).unwrap();
    }
    let value = compared(&folder);
    assert_eq!(
        (&value["first"]["thing"], &value["first"]["step"]),
        (&"loss".into(), &1.into()),
        "{value}"
    );
    assert_eq!(value["steps_with_digests"], 0, "{value}");
    let ended = compare(&folder);
    assert!(ended.stdout.contains("only losses are compared"), "{ended}");
}

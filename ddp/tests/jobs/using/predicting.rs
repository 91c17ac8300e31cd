//! `ddp-train predict`: what it writes, on any number of ranks.

use super::*;

#[test]
fn predictions_are_what_the_evaluation_counts() {
    let folder = trained(GLYPHS);
    let predict = |out: &str| {
        folder
            .alone(&format!("predict {ROWS} --out {out}"))
            .run()
            .assert_well()
    };
    all_at_once(
        [
            "c.npy",
            "p.npy --probabilities",
            "l.npy --logits",
            "all.csv --probabilities --logits",
            "few.csv",
        ],
        predict,
    );
    let classes = array(&folder, "c.npy").to_vec::<i64>().unwrap();
    let [p, logits] = ["p.npy", "l.npy"].map(|name| {
        let rows = array(&folder, name);
        assert_eq!(rows.shape().dims(), [700, 10]);
        rows.to_vec::<f32>().unwrap()
    });
    let right = classes
        .iter()
        .zip(classes_of("glyphs,rows=256,held-out=700"))
        .filter(|(a, b)| **a == *b)
        .count();
    let found = evaluated(folder.alone(&format!("eval {ROWS} --json")));
    assert_eq!(found["right"], right);

    let (all, few) = (table(&folder, "all.csv"), table(&folder, "few.csv"));
    assert_eq!(all[0][..4], ["row", "prediction", "probability", "p:0"]);
    assert_eq!((all[0].len(), &all[0][22][..]), (23, "logit:9"));
    assert_eq!(few[0], all[0][..3]);
    assert_eq!((all.len(), few.len()), (701, 701));
    for (row, ((line, short), class)) in all[1..].iter().zip(&few[1..]).zip(&classes).enumerate() {
        assert_eq!(line[..3], short[..]);
        assert_eq!((&line[0], &line[1]), (&row.to_string(), &class.to_string()));
        let numbers: Vec<f32> = line[3..].iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(numbers[..10], p[10 * row..][..10], "row {row}");
        assert_eq!(numbers[10..], logits[10 * row..][..10], "row {row}");
        assert_eq!(
            line[2].parse::<f32>().unwrap(),
            p[10 * row + *class as usize]
        );
        // Ten numbers, each rounded to half an ulp of at most 1.
        let sum: f64 = numbers[..10].iter().map(|&p| f64::from(p)).sum();
        assert!(
            (sum - 1.0).abs() <= 10.0 * f64::from(f32::EPSILON) / 2.0,
            "row {row}: {sum}"
        );
    }
}

#[test]
fn any_number_of_ranks_gives_the_same_bytes() {
    let folder = trained(GLYPHS);
    // Twenty-two batches, the last of which is short.
    let rows = format!("{ROWS} --batch-size 32");
    let alone = evaluated(folder.alone(&format!("eval {rows} --json")));
    let files = ["a.csv --probabilities --logits", "b.npy --logits"];
    let write = |ranks: usize| {
        all_at_once(files, |file| {
            let words = format!("predict {rows} --out {ranks}-{file}");
            if ranks == 1 {
                folder.alone(&words)
            } else {
                folder.ranks(ranks, &words)
            }
            .run()
            .assert_well();
        });
    };
    write(1);
    for ranks in [2, 3] {
        assert_eq!(
            evaluated(folder.ranks(ranks, &format!("eval {rows} --json"))),
            alone,
            "{ranks} ranks"
        );
        write(ranks);
        for name in files.map(|file| file.split(' ').next().unwrap()) {
            assert!(
                bytes(&folder, &format!("{ranks}-{name}")) == bytes(&folder, &format!("1-{name}")),
                "{ranks} ranks: {name}"
            );
        }
    }
    // Fewer rows than ranks.
    let few = "--checkpoint OUT --data glyphs,rows=2,held-out=0 --device cpu";
    folder
        .ranks(3, &format!("predict {few} --out three.csv"))
        .run()
        .assert_well();
    folder
        .alone(&format!("predict {few} --out one.csv"))
        .run()
        .assert_well();
    assert_eq!(table(&folder, "one.csv").len(), 3);
    assert!(bytes(&folder, "three.csv") == bytes(&folder, "one.csv"));
}

#[test]
fn numbers_are_predicted_and_measured() {
    let data = "--data synthetic:regression,rows=256,held-out=90,features=8,outputs=2";
    let folder = trained(&format!(
        "{data} --hidden 16 --batch-size 32 --epochs 2 --log-every 1 --out OUT --device cpu"
    ));
    let use_it = format!("--checkpoint OUT {data} --device cpu");
    let found = evaluated(folder.alone(&format!("eval {use_it} --json")));
    let log = folder.metrics_log();
    let last = *log.all("eval").last().unwrap();
    assert_eq!(
        number(&found, "loss").to_bits(),
        number(last, "loss").to_bits()
    );
    assert!(found["accuracy"].is_null());
    let ended = folder.alone(&format!("eval {use_it}")).run();
    ended.assert_well();
    assert!(
        ended.stdout.contains("\ncolumn ") && ended.stdout.contains("\nmean "),
        "{ended}"
    );

    folder
        .alone(&format!("predict {use_it} --out a.npy"))
        .run()
        .assert_well();
    folder
        .alone(&format!("predict {use_it} --out a.csv"))
        .run()
        .assert_well();
    let (rows, lines) = (array(&folder, "a.npy"), table(&folder, "a.csv"));
    assert_eq!(
        (rows.shape().dims(), &lines[0][..]),
        (
            &[90, 2][..],
            &["row", "prediction:0", "prediction:1"].map(String::from)[..]
        )
    );
    let values = rows.to_vec::<f32>().unwrap();
    let written: Vec<f32> = lines[1..]
        .iter()
        .flat_map(|line| &line[1..])
        .map(|text| text.parse().unwrap())
        .collect();
    assert_eq!(written, values);
    let held_out = ddp::data::open(&data[7..].parse::<DataSpec>().unwrap())
        .unwrap()
        .held_out;
    let [_, targets] = read_rows(&*held_out, &(0..90).collect::<Vec<_>>()).unwrap();
    let targets = targets.to_vec::<f32>().unwrap();
    let mut squared = 0.0;
    for (output, column) in found["columns"].as_array().unwrap().iter().enumerate() {
        assert_eq!(column["name"], output.to_string());
        let of_column = |values: &[f32]| -> Vec<f64> {
            let own = values.chunks(2).map(|row| f64::from(row[output]));
            own.collect()
        };
        let (given, wanted) = (of_column(&values), of_column(&targets));
        let apart = given.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        let apart: Vec<f64> = apart.collect();
        let absolute = apart.iter().sum::<f64>() / 90.0;
        let of_squares = apart.iter().map(|a| a * a).sum::<f64>() / 90.0;
        squared += of_squares / 2.0;
        // 90 additions in f64 in another order, and a root.
        for (name, value) in [
            ("mean_absolute_error", absolute),
            ("mean_squared_error", of_squares),
        ] {
            assert!((number(column, name) - value).abs() <= 92.0 * f64::EPSILON * value);
        }
    }
    let r2 = |output: usize| number(&found["columns"][output], "r2");
    assert_eq!(number(&found, "mean_r2"), (r2(0) + r2(1)) / 2.0);
    assert!(
        (number(last, "mean_r2") - number(&found, "mean_r2")).abs() < 1e-9,
        "{last}"
    );
    // Losses are rounded to f32 row by row and in sum.
    assert!((number(&found, "loss") - squared).abs() <= 92.0 * f64::from(f32::EPSILON) * squared);

    let cause = folder
        .alone(&format!("predict {use_it} --out p.npy --probabilities"))
        .run();
    assert!(
        cause
            .assert_fails(2)
            .contains("--probabilities: expected a model for classification"),
        "{cause}"
    );
}

/// A Python that has torch and safetensors: the one that DDP_PYTHON names, else python3.
fn python_with_torch() -> Option<String> {
    let python = std::env::var("DDP_PYTHON").unwrap_or_else(|_| "python3".into());
    let tried = std::process::Command::new(&python)
        .args(["-c", "import torch, numpy, safetensors.torch"])
        .output();
    tried
        .is_ok_and(|tried| tried.status.success())
        .then_some(python)
}

#[test]
fn pytorch_loads_the_model_and_gives_the_same_logits() {
    let Some(python) = python_with_torch() else {
        ddp_testing::skip("no Python with torch and safetensors (DDP_PYTHON names one)");
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/peers/logits_torch.py");
    for flags in [
        "--activation relu",
        "--activation gelu --dropout 0.1",
        "--activation gelu-tanh --hidden 32,24",
        "--hidden none",
    ] {
        let words = if flags.contains("--hidden") {
            GLYPHS.replace("--hidden 16", "")
        } else {
            GLYPHS.to_string()
        };
        let folder = trained(&format!("{words} {flags}"));
        let rows = ddp::data::open(&"glyphs,held-out=100".parse::<DataSpec>().unwrap())
            .unwrap()
            .held_out;
        let [x, _] = read_rows(&*rows, &(0..100).collect::<Vec<_>>()).unwrap();
        x.save_npy(folder.path().join("rows.npy")).unwrap();
        let checkpoint = "OUT/checkpoints/step-00000016";
        let predict = format!(
            "predict --checkpoint {checkpoint} --data rows.npy --out logits.npy --logits --device cpu"
        );
        folder.alone(&predict).run().assert_well();
        let about = folder.alone(&format!("inspect {checkpoint} --json")).run();
        about.assert_well();
        std::fs::write(folder.path().join("about.json"), &about.stdout).unwrap();
        let mut command = std::process::Command::new(&python);
        command.arg(&script).args([
            "about.json",
            "out/checkpoints/step-00000016/model.safetensors",
            "rows.npy",
            "logits.npy",
        ]);
        let ended = command.current_dir(folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(
            ended.status.success(),
            "{flags}: {said}{}",
            String::from_utf8_lossy(&ended.stderr)
        );
        println!("{flags}: {said}");
    }
}

/// `paste` beside predictions broke rows with line ends in quotes, and those that end in CRLF.
#[test]
fn kept_columns_stand_before_the_predictions_of_their_rows_on_any_number_of_ranks() {
    let folder = Folder::new("keep");
    let cells = |row: u32| format!("\"F\r\n{row}\",{},{}", row % 5, row % 2);
    let text: String = (0..40).map(|row| cells(row) + "\r\n").collect();
    let text = "id,x,label\r\n".to_string() + &text;
    std::fs::write(folder.path().join("t.csv"), text).unwrap();
    let train = "--data t.csv --drop id --hidden 4 --steps 1 --device cpu --out OUT";
    folder.alone(train).run().assert_well();
    let words = "predict --checkpoint OUT --data t.csv --batch-size 6 --device cpu --out";
    folder
        .alone(&format!("{words} plain.csv"))
        .run()
        .assert_well();
    let kept = |ranks: usize| {
        let words = format!("{words} {ranks}.csv --keep all");
        folder.ranks(ranks, &words).run().assert_well();
        String::from_utf8(bytes(&folder, &format!("{ranks}.csv"))).unwrap()
    };
    let plain = String::from_utf8(bytes(&folder, "plain.csv")).unwrap();
    let mut lines = plain.lines();
    let head = format!("id,x,label,{}\n", lines.next().unwrap());
    let rows = (0..40)
        .zip(lines)
        .map(|(row, line)| format!("{},{line}\n", cells(row)));
    let expected = head + &rows.collect::<String>();
    assert_eq!(kept(1), expected);
    assert_eq!(kept(3), expected);
}

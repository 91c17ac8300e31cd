//! What tasks write and show.

use ddp_kernels::{Device, Tensor, npy};

use super::*;

fn options(format: SaveAs, probabilities: bool, logits: bool) -> PredictionOptions {
    PredictionOptions {
        format,
        probabilities,
        logits,
        names: None,
    }
}

fn classes(names: &[&str]) -> TaskSpec {
    TaskSpec::named_classes(names.iter().map(|name| name.to_string()).collect())
}

fn written(options: PredictionOptions, spec: &TaskSpec, values: &[f32]) -> Vec<u8> {
    let predictions = of(spec).predictions(options).unwrap();
    let rows = values.chunks(spec.outputs());
    let mut bytes = predictions.head(rows.len()).unwrap();
    for (row, values) in (0..).zip(rows) {
        predictions.row(row, values, &mut bytes);
    }
    bytes
}

#[test]
fn a_table_reads_back_with_names_that_need_quotes() {
    let task = classes(&["plain", "with, comma", "with \"quotes\""]);
    let logits = [0.5, 2.0, -1.0, 3.0, 3.0, -2e-9];
    let bytes = written(options(SaveAs::Csv, true, true), &task, &logits);
    let mut reader = csv::Reader::from_reader(&bytes[..]);
    let heads: Vec<String> = reader.headers().unwrap().iter().map(String::from).collect();
    assert_eq!(
        heads[..6],
        [
            "row",
            "prediction",
            "probability",
            "p:plain",
            "p:with, comma",
            "p:with \"quotes\""
        ]
    );
    assert_eq!(
        heads[6..],
        ["logit:plain", "logit:with, comma", "logit:with \"quotes\""]
    );
    let rows: Vec<Vec<String>> = reader
        .records()
        .map(|row| row.unwrap().iter().map(String::from).collect())
        .collect();
    assert_eq!((&rows[0][1][..], &rows[1][1][..]), ("with, comma", "plain"));
    for (row, logits) in rows.iter().zip(logits.chunks(3)) {
        let numbers: Vec<f32> = row[2..].iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(numbers[4..], *logits, "to the bit");
        assert_eq!(
            numbers[0],
            numbers[1..4].iter().copied().fold(0.0, f32::max)
        );
        // Three numbers rounded to half an ulp each.
        assert!((numbers[1..4].iter().map(|&p| f64::from(p)).sum::<f64>() - 1.0).abs() < 2e-7);
    }
}

#[test]
fn arrays_are_numpys() {
    let task = classes(&["a", "b"]);
    let load = |options: PredictionOptions, task: &TaskSpec, values: &[f32]| {
        npy::parse(&written(options, task, values), ddp_kernels::Device::Cpu).unwrap()
    };
    let logits = [1.0, 2.0, 5.0, 4.0, 0.0, 0.0];
    let classes = load(options(SaveAs::Npy, false, false), &task, &logits);
    assert_eq!(
        (classes.shape().dims(), classes.to_vec::<i64>().unwrap()),
        (&[3][..], vec![1, 0, 0])
    );
    for (names, expected) in [(["-1", "1"], [1, -1, -1]), (["5", "06"], [1, 0, 0])] {
        let task = self::classes(&names);
        let named = load(options(SaveAs::Npy, false, false), &task, &logits);
        assert_eq!(named.to_vec::<i64>().unwrap(), expected, "{names:?}");
    }
    let raw = load(options(SaveAs::Npy, false, true), &task, &logits);
    assert_eq!(
        (raw.shape().dims(), raw.to_vec::<f32>().unwrap()),
        (&[3, 2][..], logits.to_vec())
    );
    let p = load(options(SaveAs::Npy, true, false), &task, &logits);
    assert_eq!(p.to_vec::<f32>().unwrap()[4..], [0.5, 0.5]);
    let numbers = load(
        options(SaveAs::Npy, false, false),
        &TaskSpec::Regression { outputs: 2 },
        &logits,
    );
    assert_eq!(
        (numbers.shape().dims(), numbers.to_vec::<f32>().unwrap()),
        (&[3, 2][..], logits.to_vec())
    );
}

/// The loss with class weights was printed as "loss", and the plain one nowhere.
#[test]
fn a_loss_with_class_weights_is_named_and_the_plain_one_stands_beside_it() {
    let mut evaluation = of(&classes(&["a", "b"])).evaluation(None);
    let tensor = |values: &[f32]| Tensor::from_slice(values, &[2, 2], Device::Cpu).unwrap();
    let output = tensor(&[0.0, 3f32.ln(), 0.0, 0.0]);
    let targets = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
    let sums = evaluation.count(&output, &targets).unwrap();
    let mut totals = Totals {
        rows: 2,
        loss: 0.875,
        sums,
    };
    // The probabilities are 3/4 and 1/2.
    let plain = (4f64 / 3.0).ln().midpoint(2f64.ln());
    let json = evaluation.json(&totals)["plain_loss"].as_f64().unwrap();
    // f32 of ln 3 is off by 2^-24 at most.
    assert!((json - plain).abs() < 1e-7, "{json} {plain}");
    let text = evaluation.text(&totals);
    let expected = "loss 0.8750 with class weights or label smoothing, 0.4904 without, accuracy ";
    assert!(text.starts_with(expected), "{text}");
    totals.loss = plain;
    let text = evaluation.text(&totals);
    assert!(text.starts_with("loss 0.4904, accuracy "), "{text}");
}

#[test]
fn perplexity_and_bits_follow_from_the_loss_of_tokens() {
    let task = |are_bytes| {
        of(&TaskSpec::NextToken {
            packed: false,
            vocabulary: 256,
            are_bytes,
            tokenizer: None,
        })
    };
    let totals = Totals {
        rows: 3,
        // A uniform guess of 256 tokens: 8 bits.
        loss: 256f64.ln(),
        sums: vec![24.0],
    };
    let text = |are_bytes| task(are_bytes).evaluation(None).text(&totals);
    assert_eq!(text(false), "loss 5.5452, perplexity 256.0 (24 tokens)");
    assert_eq!(
        text(true),
        "loss 5.5452, perplexity 256.0, bits per byte 8.000 (24 tokens)"
    );
    let json = task(true).evaluation(None).json(&totals);
    assert_eq!(
        (&json["tokens"], json["bits_per_byte"].as_f64()),
        (&serde_json::json!(24), Some(8.0))
    );
    let smoothed = LossOptions {
        label_smoothing: 0.1,
        ..LossOptions::default()
    };
    let error = task(true).check(&smoothed, "the tokens").unwrap_err();
    assert!(error.to_string().contains("`label-smoothing`"), "{error}");
    let predicted = task(true).predictions(options(SaveAs::Csv, false, false));
    assert!(predicted.is_err());
}

#[test]
fn numbers_have_a_column_each() {
    let one = written(
        options(SaveAs::Csv, false, false),
        &TaskSpec::Regression { outputs: 1 },
        &[0.25, -1e-9],
    );
    assert_eq!(
        String::from_utf8(one).unwrap(),
        "row,prediction\n0,0.25\n1,-1e-9\n"
    );
    let two = written(
        options(SaveAs::Csv, false, false),
        &TaskSpec::Regression { outputs: 2 },
        &[1.0, 2.0],
    );
    assert_eq!(
        String::from_utf8(two).unwrap(),
        "row,prediction:0,prediction:1\n0,1.0,2.0\n"
    );
    let named = PredictionOptions {
        names: Some(["price", "rent, cold"].map(String::from).into()),
        ..options(SaveAs::Csv, false, false)
    };
    let named = written(named, &TaskSpec::Regression { outputs: 2 }, &[1.0, 2.0]);
    assert_eq!(
        String::from_utf8(named).unwrap(),
        "row,prediction:price,\"prediction:rent, cold\"\n0,1.0,2.0\n"
    );
}

/// One MSE and R² over columns of different units hid a column that was not learned.
#[test]
fn each_column_of_numbers_has_its_own_errors_and_the_mean_is_that_of_r2() {
    let names = ["price", "area"].map(String::from).to_vec();
    let mut evaluation = of(&TaskSpec::Regression { outputs: 2 }).evaluation(Some(names));
    // Prices are off by 1000 at most; areas hardly follow the rows.
    let targets = [1000.0f32, 1.0, 5000.0, 2.0, 9000.0, 3.0];
    let outputs = [2000.0f32, 2.0, 5000.0, 2.0, 8000.0, 2.5];
    let tensor = |values: &[f32]| Tensor::from_slice(values, &[3, 2], Device::Cpu).unwrap();
    let sums = evaluation
        .count(&tensor(&outputs), &tensor(&targets))
        .unwrap();
    let (rows, loss) = (3, 0.5);
    let totals = Totals { rows, loss, sums };
    let json = evaluation.json(&totals);
    let number = |column: usize, name: &str| json["columns"][column][name].as_f64().unwrap();
    assert_eq!(json["columns"][0]["name"], "price");
    // Variances: 32e6 / 3 and 2 / 3. Squared errors: 2e6 / 3 and 1.25 / 3.
    let r2 = 1.0 - 2.0 / 32.0;
    assert!((number(0, "r2") - r2).abs() < 1e-12 && (number(1, "r2") - 0.375).abs() < 1e-12);
    assert!((number(0, "root_mean_squared_error") - (2e6f64 / 3.0).sqrt()).abs() < 1e-9);
    assert!((number(1, "mean_absolute_error") - 0.5).abs() < 1e-12);
    assert!((json["mean_r2"].as_f64().unwrap() - (r2 + 0.375) / 2.0).abs() < 1e-12);
    assert_eq!(
        evaluation.text(&totals),
        "column      RMSE       MAE        R²\n\
         price    816.497   666.667  0.937500\n\
         area    0.645497  0.500000  0.375000\n\
         mean                        0.656250"
    );
}

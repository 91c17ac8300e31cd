//! Wrong arrays never train in silence.

use super::*;

fn learned(data: &Path, task: Option<TaskKind>) -> Result<String, (u8, String)> {
    let request = DataRequest {
        task,
        ..request(data, None)
    };
    let data = prepare(&request, &crate::Alone);
    let data = data.map_err(|error| (error.exit_code(), error.to_string()))?;
    Ok(data.train.task().to_string())
}

#[track_caller]
fn assert_refused(outcome: Result<String, (u8, String)>, parts: &[&str]) {
    let (code, text) = outcome.unwrap_err();
    let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
    assert!(
        code == 65 && missing.is_empty(),
        "{missing:?} in {code}: {text}"
    );
}

#[test]
fn one_hot_rows_are_not_learned_as_numbers_by_guess() {
    let scratch = Scratch::new();
    let x = floats(&scratch, "x.npy", &[&[1.0], &[2.0], &[3.0]]);
    let y = floats(&scratch, "y.npy", &[&[0.0, 1.0], &[1.0, 0.0], &[0.0, 1.0]]);
    let ask = |task| DataRequest {
        task,
        ..request(&x, Some(&y))
    };
    let error = prepare(&ask(None), &crate::Alone).unwrap_err();
    let text = error.to_string();
    assert!(error.exit_code() == 65, "{text}");
    assert!(
        text.contains("y.npy") && text.contains("argmax") && text.contains("`task`"),
        "{text}"
    );
    let data = prepare(&ask(Some(TaskKind::Regression)), &crate::Alone).unwrap();
    assert_eq!(data.train.task().to_string(), "regression of 2 numbers");
}

#[test]
fn ranks_with_different_files_of_the_same_shape_are_refused() {
    let scratch = Scratch::new();
    let rows: Vec<[f32; 1]> = (0..1000).map(|row| [row as f32]).collect();
    let rows: Vec<&[f32]> = rows.iter().map(|row| &row[..]).collect();
    let x = floats(&scratch, "x.npy", &rows);
    let asked = request(&x, Some(&scratch.path().join("y.npy")));
    let DataSpec::Files(spec) = &asked.data else {
        panic!("it is a file");
    };
    let opened = |odd: usize| {
        let label = |row| if row == odd { 2 } else { row as i64 % 3 };
        // A new file at the same path.
        let _ = fs::remove_file(scratch.path().join("y.npy"));
        whole(&scratch, "y.npy", &(0..1000).map(label).collect::<Vec<_>>());
        open_files(resolve(&asked, DATA, spec, None).unwrap(), None).unwrap()
    };
    let one = opened(usize::MAX);
    let other = opened(777);
    // A copy is another file with the same content.
    let copy = opened(usize::MAX);
    assert_ne!(one.identity(), copy.identity());
    let found = |second: &crate::open::OpenFiles| {
        ranks(3, |world| {
            let source = if world.rank() == 1 { second } else { &one };
            let found = scan(&asked, source, None, world);
            let found = found.map(|found| found.content.unwrap());
            found.map_err(|error| (error.exit_code(), error.to_string()))
        })
    };
    let same = found(&one);
    assert!(same[0].is_ok() && same.iter().all(|found| *found == same[0]));
    assert_eq!(found(&copy), same);
    for error in found(&other) {
        let (code, text) = error.unwrap_err();
        assert!(code == 78 && text.contains("rank 1"), "{code}: {text}");
        assert!(
            text.contains("the content of the labels") && text.contains("x.npy"),
            "{text}"
        );
    }
}

#[test]
fn an_array_that_cannot_be_used_is_named_rather_than_missing_labels() {
    use safetensors::{Dtype, tensor::TensorView};
    let scratch = Scratch::new();
    let x = TensorView::new(Dtype::F32, vec![], &[0; 4]).unwrap();
    let y = bytes(&[0, 1], i64::to_le_bytes);
    let y = TensorView::new(Dtype::I64, vec![2], &y).unwrap();
    let path = scratch.path().join("d.safetensors");
    let bytes = safetensors::serialize([("x", &x), ("y", &y)], None).unwrap();
    fs::write(&path, bytes).unwrap();
    let parts = ["the array \"x\" cannot be used", "a single number"];
    assert_refused(learned(&path, None), &parts);
    // An array without a name, and without labels.
    let x = floats(&scratch, "x.npy", &[&[1.0, 6.0, 3.0]]);
    let (code, text) = learned(&x, None).unwrap_err();
    assert!(
        code == 2 && text.contains("got one array with rows of shape [3]"),
        "{text}"
    );
}

#[test]
fn a_long_number_is_shown_in_short() {
    let scratch = Scratch::new();
    let x = floats(&scratch, "x.npy", &[&[1.0], &[2.0]]);
    let y = npy(
        &scratch,
        "y.npy",
        "<f8",
        &[2],
        &bytes(&[0.5, 1e300], f64::to_le_bytes),
    );
    let error = prepare(&request(&x, Some(&y)), &crate::Alone).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("y.npy, row 1 (counted from 0): number 0 of the label"),
        "{text}"
    );
    assert!(
        text.contains("expected a finite f32, got 1e300; help"),
        "{text}"
    );
}

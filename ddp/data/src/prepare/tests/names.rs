//! Which arrays are features and which is the label: the same in all files of one model, whatever
//! else they contain.

use super::*;

fn alone(request: &DataRequest) -> Result<Data> {
    prepare(request, &crate::Alone)
}

/// It is refused with this code, for a reason that has these parts.
#[track_caller]
fn refused(request: &DataRequest, code: u8, parts: &[&str]) {
    let error = alone(request).unwrap_err();
    assert_eq!(error.exit_code(), code, "{error}");
    let missing: Vec<_> = parts
        .iter()
        .filter(|part| !error.to_string().contains(**part))
        .collect();
    assert!(missing.is_empty(), "{missing:?} is not in: {error}");
}

fn classes(data: &dyn Dataset) -> Vec<i64> {
    all(data).into_iter().map(|row| row.1).collect()
}

fn labelled(data: &Path, labels: &str) -> DataRequest {
    DataRequest {
        labels: Some(labels.into()),
        ..request(data, None)
    }
}

/// A model as it was trained on these data.
pub(super) fn trained_on(data: &Data) -> Trained {
    Trained {
        task: data.train.task().clone(),
        row_shape: data.train.row_shape().to_vec(),
        plan: data.plan.clone(),
        normalization: data.normalization.clone(),
        columns: data.columns.clone(),
        label: data.label.clone(),
        needs_labels: true,
    }
}

fn later(trained: &Trained, data: &Path) -> DataRequest {
    DataRequest {
        trained: Some(trained.clone()),
        ..request(data, None)
    }
}

#[test]
fn named_arrays_are_found_in_other_files() {
    use safetensors::{Dtype, tensor::TensorView};
    let x = TensorView::new(Dtype::F32, vec![2, 1], &[0; 8]).unwrap();
    let [first, second] = [[0, 1], [1, 0]].map(|labels: [i64; 2]| bytes(&labels, i64::to_le_bytes));
    let y = |labels| TensorView::new(Dtype::I64, vec![2], labels).unwrap();
    let (first, second) = (y(&first), y(&second));
    let scratch = Scratch::new();
    let write = |name: &str, arrays: &[(&str, &TensorView<'_>)]| {
        let path = scratch.path().join(name);
        fs::write(
            &path,
            safetensors::serialize(arrays.iter().copied(), None).unwrap(),
        )
        .unwrap();
        path
    };
    let evaluated = |train: &Path, labels: &str, data: &Path| {
        let trained = trained_on(&alone(&labelled(train, labels)).unwrap());
        classes(&*alone(&later(&trained, data)).unwrap().train)
    };
    let one = write(
        "one.safetensors",
        &[("x", &x), ("y", &first), ("kind", &second)],
    );
    assert_eq!(
        (evaluated(&one, "#y", &one), evaluated(&one, "#kind", &one)),
        (vec![0, 1], vec![1, 0])
    );
    let arrays = [
        ("x_train", &x),
        ("kind_train", &first),
        ("x_test", &x),
        ("y_test", &first),
        ("kind_test", &second),
    ];
    let sides = write("sides.safetensors", &arrays);
    assert_eq!(evaluated(&sides, "#kind_train", &sides), [1, 0]);
    // Files that do not have it are taken as they look.
    let others = write(
        "others.safetensors",
        &[("features", &x), ("labels", &first)],
    );
    assert_eq!(evaluated(&one, "#kind", &others), [0, 1]);
}

#[test]
fn labels_go_with_the_features_file_by_file() {
    let scratch = Scratch::new();
    let x = |files: &[(&str, usize)]| {
        for (name, rows) in files {
            floats(
                &scratch,
                &format!("x-{name}.npy"),
                &vec![&[1.0f32][..]; *rows],
            );
        }
    };
    let y = |files: &[(&str, usize)]| {
        for (name, rows) in files {
            whole(
                &scratch,
                &format!("{name}.npy"),
                &(0..*rows as i64).map(|row| row % 2).collect::<Vec<_>>(),
            );
        }
    };
    let path = |name: &str| scratch.path().join(name);
    let asked = |labels: &str| request(&path("x-*.npy"), Some(&path(labels)));
    x(&[("01", 10), ("02", 9)]);
    y(&[("y-01", 9), ("y-02", 10), ("all", 19)]);
    refused(
        &asked("y-*.npy"),
        65,
        &[
            "y-01.npy: expected a label for each of the 10 rows of",
            "x-01.npy",
            "got 9",
        ],
    );
    assert_eq!(alone(&asked("all.npy")).unwrap().train.rows(), 19);
    y(&[("y-01", 10), ("y-02", 5), ("y-03", 4)]);
    refused(
        &asked("y-*.npy"),
        65,
        &["`labels`", "one for each of the 2 files", "got 3"],
    );
    // In the order of their numbers: 1, 2, 10 go with 01, 02, 10, and not with 1, 3, 10.
    x(&[("02", 10), ("10", 10)]);
    y(&[("z-1", 10), ("z-2", 10), ("z-10", 10)]);
    assert_eq!(alone(&asked("z-*.npy")).unwrap().train.rows(), 30);
    y(&[("u-1", 10), ("u-3", 10), ("u-10", 10)]);
    let parts = [
        "`labels`",
        "u-3.npy",
        "x-02.npy",
        "give both the same numbers",
    ];
    refused(&asked("u-*.npy"), 65, &parts);
    y(&[("w64-0001", 10), ("w64-0002", 10), ("w64-0010", 10)]);
    assert_eq!(alone(&asked("w64-*.npy")).unwrap().train.rows(), 30);
}

#[test]
fn files_are_in_the_order_of_their_numbers() {
    let scratch = Scratch::new();
    for number in 0..12 {
        floats(&scratch, &format!("x-{number}.npy"), &[&[number as f32]]);
    }
    let labels: Vec<i64> = (0..12).map(|number| number % 2).collect();
    let y = whole(&scratch, "y.npy", &labels);
    let data = alone(&request(&scratch.path().join("x-*.npy"), Some(&y))).unwrap();
    let expected: Vec<_> = (0..12)
        .map(|number| (vec![number as f32], i64::from(number % 2)))
        .collect();
    assert_eq!(all(&*data.train), expected);
}

#[test]
fn features_are_not_their_own_labels() {
    let scratch = Scratch::new();
    let x = floats(&scratch, "x.npy", &[&[1.5], &[2.0], &[3.0]]);
    std::os::unix::fs::symlink(&x, scratch.path().join("z.npy")).unwrap();
    for labels in ["x.npy", "z.npy"] {
        let labels = scratch.path().join(labels);
        refused(
            &request(&x, Some(&labels)),
            2,
            &["`labels`", "the same ones"],
        );
    }
}

#[test]
fn rows_to_test_on_are_not_trained_on_because_they_alone_have_labels() {
    use safetensors::{Dtype, tensor::TensorView};
    let scratch = Scratch::new();
    let zeros = bytes(&[0, 1], i64::to_le_bytes);
    let x = TensorView::new(Dtype::F32, vec![2, 1], &[0; 8]).unwrap();
    let y = TensorView::new(Dtype::I64, vec![2], &zeros).unwrap();
    let path = scratch.path().join("d.safetensors");
    let arrays = [("x_train", &x), ("x_test", &x), ("y_test", &y)];
    fs::write(&path, safetensors::serialize(arrays, None).unwrap()).unwrap();
    let parts = ["expected labels of x_train in the file", "x_test [1]"];
    refused(&request(&path, None), 2, &parts);
    let named = PathBuf::from(format!("{}#x_test", path.display()));
    assert_eq!(
        classes(&*alone(&request(&named, None)).unwrap().train),
        [0, 1]
    );
    // Labels in a file of their own are those of the rows to train on.
    let other = whole(&scratch, "y.npy", &[1, 0]);
    let data = alone(&request(&path, Some(&other))).unwrap();
    assert!(data.description.contains("x_test"), "{}", data.description);
}

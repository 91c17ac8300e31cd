//! From tables to data, on one rank and on several: the same rows, the same errors.

mod chosen;
mod names;
mod settings;
#[path = "../../../data/src/prepare/tests/support.rs"]
mod support;
mod targets;
#[path = "../../../data/src/ranks/tests/threads.rs"]
mod threads;
mod truth;

use std::fs;
use std::path::{Path, PathBuf};

use ddp_data::{
    Alone, Data, DataRequest, Dataset, Error, FeaturePlan, LabelName, Missing, Normalization,
    Ranks, Result, Scaling, TaskKind, TaskSpec, Trained, read_rows,
};
use ddp_kernels::files::testing::Scratch;

use self::support::{all, bytes, floats, npy, request, whole};
use self::threads::ranks;
use crate::READER;

/// A file with this text, at this name in the scratch folder.
fn put(scratch: &Scratch, name: &str, text: &str) -> PathBuf {
    let path = scratch.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path
}

fn prepare(request: &DataRequest, ranks: &dyn Ranks) -> Result<Data> {
    ddp_data::prepare(request, Some(READER), ranks)
}

/// A model that was trained on texts.
fn trained() -> Trained {
    Trained {
        task: TaskSpec::named_classes(["ant", "bee", "cow"].map(String::from).into()),
        row_shape: vec![2],
        normalization: Some(Normalization::new(vec![1.0, 2.0], vec![2.0, 0.5])),
        plan: FeaturePlan::default(),
        columns: Some(vec!["a".into(), "b".into()]),
        label: Some(LabelName::Column("kind".into())),
        needs_labels: true,
    }
}

fn table(scratch: &Scratch, text: &str) -> DataRequest {
    let path = scratch.path().join("t.csv");
    fs::write(&path, text).unwrap();
    DataRequest {
        trained: Some(trained()),
        ..request(&path, None)
    }
}

#[test]
fn eval_uses_the_models_columns_classes_and_normalization() {
    let scratch = Scratch::new();
    let world = Alone;
    let text = "kind,b,more,a\ncow,6,x,1\nbee,4,y,3\n";
    let mut request = table(&scratch, text);
    request.labels = Some("kind".into());
    let data = prepare(&request, &world).unwrap();
    assert_eq!(
        all(&*data.train),
        [(vec![0.0, 2.0], 2), (vec![4.0, 1.0], 1)]
    );
    assert_eq!(
        (data.held_out.rows(), data.columns.unwrap()),
        (0, vec!["a".to_string(), "b".to_string()])
    );
    // Without labels every class is 0, and the column need not be there.
    request.trained.as_mut().unwrap().needs_labels = false;
    request.labels = None;
    assert_eq!(
        all(&*prepare(&request, &world).unwrap().train),
        [(vec![0.0, 2.0], 0), (vec![4.0, 1.0], 0)]
    );
    // Arrays have no names: then they are taken in their order.
    let x = floats(&scratch, "x.npy", &[&[1.0, 6.0], &[3.0, 4.0]]);
    let request = DataRequest {
        trained: request.trained,
        ..self::request(&x, None)
    };
    assert_eq!(
        all(&*prepare(&request, &world).unwrap().train),
        [(vec![0.0, 2.0], 0), (vec![4.0, 1.0], 0)]
    );
}

#[test]
fn rows_that_a_model_was_not_trained_for_are_refused_with_their_place() {
    let scratch = Scratch::new();
    let error = |request: &DataRequest| {
        let errors = ranks(2, |world| prepare(request, world).unwrap_err().to_string());
        assert_eq!(errors[0], errors[1]);
        errors[0].clone()
    };
    let message = error(&table(&scratch, "a,b,kind\n1,2,ant\n1,2,dog\n1,2,emu\n"));
    assert!(
        message.contains("t.csv")
            && message
                .contains("line 3, column \"kind\": the label: expected one of the 3 classes"),
        "{message}"
    );
    let message = error(&table(&scratch, "a,c,kind\n1,2,ant\n"));
    assert!(
        message.contains("t.csv") && message.contains('b'),
        "{message}"
    );
    let x = floats(&scratch, "x.npy", &[&[1.0, 6.0, 3.0]]);
    let y = whole(&scratch, "y.npy", &[0]);
    let needs_labels = false;
    let message = error(&DataRequest {
        trained: Some(Trained {
            needs_labels,
            ..trained()
        }),
        ..request(&x, None)
    });
    assert!(
        message.contains("x.npy: expected 2 features a row") && message.contains("got 3"),
        "{message}"
    );
    let mut other = trained();
    other.task = TaskSpec::Regression { outputs: 2 };
    let x = floats(&scratch, "x.npy", &[&[1.0, 6.0]]);
    let message = error(&DataRequest {
        trained: Some(other),
        ..request(&x, Some(&y))
    });
    assert!(
        message.contains("y.npy: expected 2 numbers as the label of each row"),
        "{message}"
    );
}

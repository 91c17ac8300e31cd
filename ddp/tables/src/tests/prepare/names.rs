//! Which columns are features and which is the label: the same in all files of one model, whatever
//! else they contain.

use super::*;

fn alone(request: &DataRequest) -> Result<Data> {
    prepare(request, &Alone)
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

fn with_val(data: &Path, val: &Path) -> DataRequest {
    DataRequest {
        val_data: Some(val.to_str().unwrap().parse().unwrap()),
        ..request(data, None)
    }
}

/// A model as it was trained on these data.
fn trained_on(data: &Data) -> Trained {
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
fn the_label_of_the_first_file_is_that_of_all() {
    let scratch = Scratch::new();
    let first = put(&scratch, "d/a.csv", "x1,x2,y\n1,2,0\n3,4,1\n");
    put(&scratch, "d/b.csv", "x1,x2,y,z\n5,6,1,0\n7,8,0,1\n");
    let folder = scratch.path().join("d");
    let data = alone(&request(&folder, None)).unwrap();
    assert_eq!(
        (classes(&*data.train), &data.label),
        (vec![0, 1, 1, 0], &Some(LabelName::Column("y".into())))
    );

    // So it is where rows are evaluated on, in training and later.
    let val = put(&scratch, "v.csv", "z,x2,y,x1,w\n0,6,1,5,0\n1,8,0,7,0\n");
    let data = alone(&with_val(&first, &val)).unwrap();
    assert_eq!(
        all(&*data.held_out),
        [(vec![5.0, 6.0], 1), (vec![7.0, 8.0], 0)]
    );
    let trained = trained_on(&data);
    assert_eq!(
        classes(&*alone(&later(&trained, &val)).unwrap().train),
        [1, 0]
    );
    // Unless somebody says otherwise.
    let otherwise = DataRequest {
        labels: Some("z".into()),
        ..later(&trained, &val)
    };
    assert_eq!(classes(&*alone(&otherwise).unwrap().train), [0, 1]);

    put(&scratch, "d/b.csv", "x1,x2,z\n5,6,1\n7,8,0\n");
    refused(
        &request(&folder, None),
        65,
        &[
            "b.csv",
            "\"y\"",
            "\"x1\", \"x2\", \"z\"",
            "give `labels` '#COLUMN'",
        ],
    );
    let other = put(&scratch, "other.csv", "x1,x2,w\n5,6,1\n7,8,0\n");
    refused(
        &later(&trained, &other),
        65,
        &[
            "other.csv",
            "\"y\"",
            "\"x1\", \"x2\", \"w\"",
            "give `labels` '#COLUMN'",
        ],
    );
}

#[test]
fn files_of_labels_alone_have_them_in_the_same_column() {
    let scratch = Scratch::new();
    for (name, x) in [("x-0.npy", 1.0), ("x-1.npy", 2.0)] {
        floats(&scratch, name, &[&[x], &[x]]);
    }
    put(&scratch, "y-0.csv", "id,kind\n7,0\n8,1\n");
    put(&scratch, "y-1.csv", "kind,id\n1,5\n0,6\n");
    let path = |name: &str| scratch.path().join(name);
    let asked = request(&path("x-*.npy"), Some(&path("y-*.csv")));
    assert_eq!(classes(&*alone(&asked).unwrap().train), [0, 1, 1, 0]);
    put(&scratch, "y-1.csv", "sort,id\n1,5\n0,6\n");
    refused(
        &asked,
        65,
        &["y-1.csv", "\"kind\"", "\"sort\", \"id\"", "FILE#COLUMN"],
    );
    // Where there is one column there is nothing to confuse.
    put(&scratch, "y-1.csv", "sort\n1\n0\n");
    assert_eq!(classes(&*alone(&asked).unwrap().train), [0, 1, 1, 0]);
}

#[test]
fn columns_that_contradict_the_model_are_refused() {
    let scratch = Scratch::new();
    let table = put(&scratch, "t.csv", "x1,x2,y\n1,2,0\n3,4,1\n");
    let part = |part: &str| PathBuf::from(format!("{}#{part}", table.display()));
    let one = trained_on(&alone(&labelled(&part("x1"), "y")).unwrap());
    refused(
        &later(&one, &part("x2")),
        2,
        &["t.csv#x2", "expected \"x1\", got \"x2\"", "leave out #x2"],
    );
    refused(
        &later(&one, &part("x1,x2")),
        2,
        &["expected 1 columns, got 2"],
    );
    assert_eq!(
        all(&*alone(&later(&one, &part("x1"))).unwrap().train),
        [(vec![1.0], 0), (vec![3.0], 1)]
    );
    // The same columns in another order are the same: the model's order counts.
    let both = trained_on(&alone(&request(&table, None)).unwrap());
    let turned = alone(&later(&both, &part("x2,x1"))).unwrap();
    assert_eq!(
        all(&*turned.train),
        [(vec![1.0, 2.0], 0), (vec![3.0, 4.0], 1)]
    );
    refused(
        &with_val(&part("x1"), &part("x2")),
        2,
        &["`val-data`", "t.csv#x2"],
    );
}

#[test]
fn the_label_is_no_feature() {
    let scratch = Scratch::new();
    let table = put(&scratch, "z.csv", "a,b,y\n1,2,0\n3,4,1\n");
    let path = table.display();
    refused(
        &labelled(Path::new(&format!("{path}#a,y")), "y"),
        2,
        &["`labels` y", "must not be a feature", "z.csv#a,b"],
    );
    let trained = trained_on(&alone(&request(&table, None)).unwrap());
    let feature = DataRequest {
        labels: Some("b".into()),
        ..later(&trained, &table)
    };
    refused(&feature, 2, &["`labels` b", "must not be a feature"]);
    // Nor is it where the table is named twice.
    let twice = alone(&labelled(&table, &format!("{path}#a"))).unwrap();
    assert_eq!(
        all(&*twice.train),
        [(vec![2.0, 0.0], 0), (vec![4.0, 1.0], 1)]
    );
    assert_eq!(
        classes(&*alone(&labelled(&table, &path.to_string())).unwrap().train),
        [0, 1]
    );
}

#[test]
fn a_flat_file_has_its_columns_where_the_model_has_them() {
    let scratch = Scratch::new();
    let convert = |text: &str, cache: &str| {
        let table = put(&scratch, "t.csv", text);
        let cache = scratch.path().join(cache);
        alone(&DataRequest {
            cache_dir: Some(cache.clone()),
            ..labelled(&table, "kind")
        })
        .unwrap();
        let mut made = fs::read_dir(&cache)
            .unwrap()
            .map(|entry| entry.unwrap().path().join("data.bin"));
        made.find(|path| path.exists()).unwrap()
    };
    let table = put(&scratch, "train.csv", "a,b,kind\n1,2,0\n3,4,1\n");
    let same = convert("kind,a,b\n1,5,6\n0,7,8\n", "same");
    let turned = convert("b,a,kind\n6,5,1\n8,7,0\n", "turned");
    let more = convert("a,b,c,kind\n5,6,0,1\n7,8,0,0\n", "more");
    let trained = trained_on(&alone(&request(&table, None)).unwrap());
    assert_eq!(
        all(&*alone(&later(&trained, &same)).unwrap().train),
        [(vec![5.0, 6.0], 1), (vec![7.0, 8.0], 0)]
    );
    refused(
        &later(&trained, &turned),
        65,
        &[
            "data.bin",
            "column 1: expected \"a\", got \"b\"",
            "in their order",
        ],
    );
    refused(&later(&trained, &more), 65, &["expected 2 columns, got 3"]);
    refused(&with_val(&table, &turned), 65, &["data.bin", "column 1"]);
    // A table is turned round to what a flat file had.
    let flat = trained_on(&alone(&request(&turned, None)).unwrap());
    let data = alone(&later(&flat, &table)).unwrap();
    assert_eq!(
        all(&*data.train),
        [(vec![2.0, 1.0], 0), (vec![4.0, 3.0], 1)]
    );
}

#[test]
fn a_name_is_a_column_before_it_is_a_folder() {
    let scratch = Scratch::new();
    let folder = scratch.path().join("target");
    fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    let table = put(&scratch, "t.csv", &format!("a,{folder},b\n1,0,2\n3,1,4\n"));
    assert_eq!(
        all(&*alone(&labelled(&table, folder)).unwrap().train),
        [(vec![1.0, 2.0], 0), (vec![3.0, 4.0], 1)]
    );
    let table = put(&scratch, "u.csv", "a,target,b\n1,0,2\n3,1,4\n");
    let hint = format!("'#{folder}' if it is the name of a column");
    refused(
        &labelled(&table, folder),
        65,
        &["`labels`", "got none", &hint],
    );
}

#[test]
fn labels_of_tables_are_all_texts_or_all_numbers() {
    let scratch = Scratch::new();
    put(&scratch, "d/a.csv", "x,kind\n1,1\n2,K\n");
    put(&scratch, "d/b.csv", "x,kind\n3,1\n4,2\n5,2\n");
    let shards = request(&scratch.path().join("d"), None);
    refused(
        &shards,
        65,
        &[
            "b.csv",
            "expected texts as labels, as in",
            "join the tables",
        ],
    );
    let one = put(&scratch, "one.csv", "x,kind\n1,1\n2,K\n3,1\n4,2\n5,02\n");
    let one = alone(&request(&one, None)).unwrap();
    // A model that has learned texts, 02, 1, 2 and K, takes numbers for such.
    let val = put(&scratch, "v.csv", "x,kind\n1,2\n2,02\n");
    let trained = trained_on(&one);
    assert_eq!(
        classes(&*alone(&later(&trained, &val)).unwrap().train),
        [2, 0]
    );
    // Numbers in an array are not these texts.
    let y = whole(&scratch, "y.npy", &[1, 2]);
    let x = floats(&scratch, "x.npy", &[&[1.0], &[2.0]]);
    let by_number = DataRequest {
        trained: Some(trained),
        ..request(&x, Some(&y))
    };
    refused(
        &by_number,
        65,
        &["y.npy: expected texts as labels, such as \"02\"", "table"],
    );
}

#[test]
fn a_label_is_named_once_and_is_not_all() {
    let scratch = Scratch::new();
    let table = put(&scratch, "t.csv", "a,y\n1,0.5\n2,1.5\n");
    refused(&labelled(&table, "y,y"), 2, &["t.csv", "got \"y\" twice"]);
    let table = put(&scratch, "t.csv", "y\n1\n");
    let parts = [
        "t.csv",
        "no column besides the label \"y\"",
        "put commas between them",
    ];
    refused(&labelled(&table, "y"), 65, &parts);
}

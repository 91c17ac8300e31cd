//! Labels that are several, or have odd digits.

use super::*;

#[test]
fn several_labels_are_learned_together() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", "a,x,b\n1,10,5\n2,20,6\n3,30,7.5\n");
    let labelled = DataRequest {
        labels: Some("b,a".into()),
        ..request(&path, None)
    };
    let data = alone(&labelled);
    assert_eq!(data.train.task().to_string(), "regression of 2 numbers");
    let said = "label columns \"b\", \"a\", regression of 2 numbers, 1 feature: \"x\"";
    assert!(data.description.contains(said), "{}", data.description);
    assert_eq!(data.columns.as_ref().unwrap(), &["x"]);
    let targets = |data: &Data| {
        let rows = (0..data.train.rows()).map(|row| read_rows(&*data.train, &[row]).unwrap());
        rows.flat_map(|[_, y]| y.to_vec::<f32>().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(targets(&data), [5.0, 1.0, 6.0, 2.0, 7.5, 3.0]);
    // By their names, wherever they are.
    let other = put(&scratch, "other.csv", "b,a,x\n7,8,9\n");
    let mut with_labels = later(&data, &other);
    with_labels.trained.as_mut().unwrap().needs_labels = true;
    assert_eq!(targets(&alone(&with_labels)), [7.0, 8.0]);
    assert_eq!(inputs(&*alone(&later(&data, &other)).train), [[9.0]]);
    for (text, part) in [
        (
            "a,x,b\n1,10,Rom\n",
            "line 2, column \"b\": expected a number as label, got \"Rom\"",
        ),
        (
            "a,x,b\n,10,1\n1,1,1\n",
            "line 2, column \"a\": expected a number or a text as label, got an empty cell; number of missing labels: 1 in 2 rows",
        ),
        ("a,x\n1,2\n", "expected a column \"b\""),
    ] {
        put(&scratch, "t.csv", text);
        let (code, text) = error(&labelled);
        assert!(code == 65 && text.contains(part), "{text}");
    }
    put(&scratch, "t.csv", "a,x,b\n1,2,3\n");
    let feature = DataRequest {
        labels: Some("b,a".into()),
        ..request(Path::new(&format!("{}#a,x", path.display())), None)
    };
    assert!(
        error(&feature)
            .1
            .contains("`labels` a: the label must not be a feature")
    );
}

#[test]
fn labels_with_leading_zeros_keep_their_digits() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", "x,y\n1,01\n2,1\n3,10\n");
    let data = alone(&request(&path, None));
    let names = data.train.task().classes().unwrap().names();
    assert_eq!(names, ["01", "1", "10"]);
    // A model of them reads other files alike, even if no label there has a leading zero.
    let val = put(&scratch, "v.csv", "x,y\n1,1\n2,10\n");
    let mut again = later(&data, &val);
    again.trained.as_mut().unwrap().needs_labels = true;
    let classes: Vec<i64> = all(&*alone(&again).train).iter().map(|row| row.1).collect();
    assert_eq!(classes, [1, 2]);
    let numbers = DataRequest {
        task: Some(TaskKind::Regression),
        ..request(&path, None)
    };
    let says =
        "t.csv, line 2, column \"y\": expected a number as label for `task` regression, got \"01\"";
    assert!(error(&numbers).1.contains(says), "{}", error(&numbers).1);
    // Among fractions it is a number.
    let path = put(&scratch, "f.csv", "x,y\n1,01\n2,1.5\n3,10\n");
    let task = alone(&request(&path, None)).train.task().clone();
    assert_eq!(task, TaskSpec::Regression { outputs: 1 });
}

#[test]
fn the_smallest_whole_number_is_no_class_and_others_are() {
    let scratch = Scratch::new();
    let y = whole(&scratch, "y.npy", &[5, i64::MIN, 7]);
    let x = floats(&scratch, "x.npy", &[&[1.0], &[2.0], &[3.0]]);
    let (code, text) = error(&request(&x, Some(&y)));
    let says = "y.npy, row 1 (counted from 0): the label: expected a class, got -9223372036854775808, the smallest i64";
    assert!(code == 65 && text.contains(says), "{text}");
}

#[test]
fn whole_numbers_other_than_0_1_2_are_classes_of_these_names() {
    let scratch = Scratch::new();
    let names = |data: &Data| data.train.task().classes().unwrap().names();
    let table = |labels: &[i64]| {
        let rows: String = labels.iter().map(|label| format!("1,{label}\n")).collect();
        put(&scratch, "t.csv", &format!("x,y\n{rows}"))
    };
    for (labels, expected) in [
        (&[1, -1, 1][..], &["-1", "1"][..]),
        (&[3, 1, 2], &["1", "2", "3"]),
        (&[70_000, 5], &["5", "70000"]),
        (&[0, -1, 1], &["-1", "0", "1"]),
        (&[2, 0, 6], &["0", "2", "6"]),
        (&[0, 1, 2], &["0", "1", "2"]),
        (
            &[9007199254740993, 9007199254740992],
            &["9007199254740992", "9007199254740993"],
        ),
    ] {
        let classes = |label: &i64| expected.iter().position(|name| *name == label.to_string());
        let classes: Vec<i64> = labels
            .iter()
            .map(|label| classes(label).unwrap() as i64)
            .collect();
        let x = vec![&[1.0][..]; labels.len()];
        let (x, y) = (
            floats(&scratch, "x.npy", &x),
            whole(&scratch, "y.npy", labels),
        );
        for request in [request(&table(labels), None), request(&x, Some(&y))] {
            let data = alone(&request);
            assert_eq!(names(&data), expected);
            let targets: Vec<i64> = all(&*data.train).into_iter().map(|row| row.1).collect();
            assert_eq!(targets, classes);
            // The same classes where the model is used, whatever rows there are.
            let mut again = later(&data, Path::new(&request.data.to_string()));
            again.labels = request.labels.clone();
            again.trained.as_mut().unwrap().needs_labels = true;
            assert_eq!(all(&*alone(&again).train), all(&*data.train));
        }
    }
    // Messages have all digits.
    let data = alone(&request(
        &table(&[9007199254740993, 9007199254740992]),
        None,
    ));
    let mut again = later(&data, &table(&[9007199254740992, 9007199254740991]));
    again.trained.as_mut().unwrap().needs_labels = true;
    let (code, text) = error(&again);
    let says = "line 3, column \"y\": the label: expected one of the 2 classes that the model was trained on, got 9007199254740991; the classes are 9007199254740992, 9007199254740993";
    assert!(code == 65 && text.contains(says), "{text}");
    // They stay numbers where the task says so, and many of them are refused.
    let regression = DataRequest {
        task: Some(TaskKind::Regression),
        ..request(&table(&[1, -1]), None)
    };
    assert_eq!(
        alone(&regression).train.task().to_string(),
        "regression of 1 number"
    );
    let many: Vec<i64> = (1..=300).map(|label| 1000 * label).collect();
    let (code, text) = error(&request(&table(&many), None));
    assert!(
        code == 65 && text.contains("300 classes for 300 rows; help: set `task` to regression"),
        "{text}"
    );
}

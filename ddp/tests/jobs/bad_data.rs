//! Files that cannot be trained on: all ranks end with the same code, and one line says which file
//! is wrong and where.

use crate::data::{Files, TRAIN, number, write};
use crate::made::{ROWS, csv, gz, idx, npy, npz};
use crate::resuming::job;
use crate::support::job::{Ended, Folder, all_at_once};

/// Files that cannot be trained on: their contents, the value of `--data`, the exit code, and what
/// the message must name. More of tables: ddp/tables/src/tests/refused.rs.
type Bad = (Files, &'static str, i32, &'static [&'static str]);

fn bad() -> Vec<Bad> {
    let x = |rows: usize| {
        npy(
            "<f4",
            &[rows, 2],
            &(0..rows * 2)
                .flat_map(|n| (n as f32).to_le_bytes())
                .collect::<Vec<u8>>(),
        )
    };
    let y = |labels: &[i64]| {
        npy(
            "<i8",
            &[labels.len()],
            &labels
                .iter()
                .flat_map(|l| l.to_le_bytes())
                .collect::<Vec<u8>>(),
        )
    };
    let x_of = |numbers: &[f64]| {
        npy(
            "<f8",
            &[numbers.len() / 2, 2],
            &numbers
                .iter()
                .flat_map(|n| n.to_le_bytes())
                .collect::<Vec<u8>>(),
        )
    };
    let table = |text: &str| vec![("d.csv", text.as_bytes().to_vec())];
    let xy = |x: Vec<u8>, y: Vec<u8>| vec![("x.npy", x), ("y.npy", y)];
    const XY: &str = "x.npy --labels y.npy";
    vec![
        (
            vec![],
            "absent.npy --labels y.npy",
            74,
            &["cannot open absent.npy", "--data"],
        ),
        (
            vec![],
            "absent-*.npy --labels y.npy",
            74,
            &["cannot open absent-*.npy", "no file matches"],
        ),
        (
            vec![("x.npy", x(4))],
            "x.npy --labels y.npy",
            74,
            &["cannot open y.npy", "--labels"],
        ),
        (
            vec![("x.npy", x(4))],
            "x.npy",
            2,
            &["--data x.npy: expected labels", "--labels FILE"],
        ),
        (
            vec![("d/readme.txt", vec![])],
            "d",
            65,
            &["--data d: expected a folder with files that end in", ".npy"],
        ),
        (
            vec![("d/a.npy", x(4)), ("d/b.csv", b"a,b\n1,2\n".to_vec())],
            "d",
            65,
            &["a.npy", "b.csv", "one kind"],
        ),
        (
            vec![
                ("d/a.csv", b"a,kind\n1,0\n2,1\n".to_vec()),
                ("d/a.csv.gz", gz(b"a,kind\n1,0\n2,1\n")),
            ],
            "d",
            65,
            &[
                "--data d: expected every row once, got a.csv and d/a.csv.gz",
                "remove one",
            ],
        ),
        (
            [
                "d/t-images-idx3-ubyte",
                "d/t-images-idx3-ubyte.gz",
                "d/t-labels-idx1-ubyte",
            ]
            .map(|name| (name, idx(&[2], &[0, 1])))
            .to_vec(),
            "d/t-images*",
            65,
            &["got t-images-idx3-ubyte and d/t-images-idx3-ubyte.gz"],
        ),
        (
            vec![
                ("d/flowers-train.csv", vec![]),
                ("d/flowers_test.csv", vec![]),
                ("d/more.csv", vec![]),
            ],
            "d",
            2,
            &[
                "--data d: expected files for one purpose",
                "got flowers_test.csv beside flowers-train.csv",
                "give one as --data and the other as --val-data",
            ],
        ),
        (
            vec![("d/train.bin", vec![7; 64]), ("d/val.bin", vec![7; 64])],
            "d",
            2,
            &["got val.bin beside train.bin; help: give one as --data"],
        ),
        (
            vec![("d/validation-0.npy", vec![]), ("d/t10k-0.npy", vec![])],
            "d",
            2,
            &["got validation-0.npy beside t10k-0.npy; help: give one as --data"],
        ),
        (
            // The name of a setting in what a user wrote stays as it is.
            vec![],
            "`lr`.csv",
            74,
            &["open `lr`.csv", "it was given as --data"],
        ),
        (
            table("a,b,kind\n1,2,0\n3,4,1\n"),
            "d.csv --drop-last",
            65,
            &[
                "--data d.csv: expected at least 10 rows",
                "--drop-last",
                "got 2",
                "--batch-size 2 or less",
            ],
        ),
        (
            xy(x(4), y(&[0, 1, 0])),
            XY,
            65,
            &["y.npy", "each of the 4 rows", "got 3"],
        ),
        (
            xy(x(4), y(&[0, 1, -3, 0])),
            XY,
            65,
            &["y.npy, row 2", "expected a class from 0 to", "got -3"],
        ),
        (
            xy(x(4), y(&[0, 0, 0, 0])),
            XY,
            65,
            &["y.npy", "at least 2 classes"],
        ),
        (
            xy(
                x(4),
                npy(
                    "<f4",
                    &[4],
                    &[0.0f32, 1.0, 1.5, 2.0].map(f32::to_le_bytes).concat(),
                ),
            ),
            "x.npy --labels y.npy --task classification",
            65,
            &["y.npy, row 2", "expected a whole number", "got 1.5"],
        ),
        (
            xy(x(4), npy("<i8", &[4, 2], &[0; 64])),
            XY,
            65,
            &["y.npy", "one label for each row", "argmax"],
        ),
        (
            xy(
                x(4),
                npy(
                    "<f4",
                    &[4],
                    &[0.0f32, f32::INFINITY, f32::NAN, 2.0]
                        .map(f32::to_le_bytes)
                        .concat(),
                ),
            ),
            XY,
            65,
            &["y.npy, row 1", "inf"],
        ),
        (
            xy(
                x_of(&[0.0, 1.0, 2.0, f64::NAN, 4.0, f64::NAN]),
                y(&[0, 1, 0]),
            ),
            XY,
            65,
            &["x.npy, row 1, feature 1", "NaN"],
        ),
        (
            xy(x_of(&[0.0, 1.0, 2.0, 3.0, 1e300, 5.0]), y(&[0, 1, 0])),
            XY,
            65,
            &["x.npy, row 2, feature 0", "expected a finite f32"],
        ),
        (
            vec![("x.npy", x(4)[..100].to_vec()), ("y.npy", y(&[0, 1, 0, 1]))],
            XY,
            65,
            &["x.npy"],
        ),
        (
            xy(npy("|O", &[4], &[0; 32]), y(&[0, 1, 0, 1])),
            XY,
            65,
            &["x.npy", "object"],
        ),
        (
            xy(npy("<f4", &[1 << 40, 1 << 20], &[0; 64]), y(&[0, 1])),
            XY,
            65,
            &["x.npy"],
        ),
        (
            xy(npy("|u1", &[2, 1 << 25], &vec![0; 1 << 26]), y(&[0, 1])),
            XY,
            65,
            &[
                "x.npy: expected at most 16777216 numbers a row",
                "got 33554432",
            ],
        ),
        (
            vec![("m.pt", b"PK\x03\x04 pickle".to_vec())],
            "m.pt",
            65,
            &["m.pt"],
        ),
        (
            vec![
                ("a.npy", x(4)),
                ("b.npy", npy("<f4", &[2, 3], &[0; 24])),
                ("y.npy", y(&[0, 1, 0, 1, 0, 1])),
            ],
            "[ab].npy --labels y.npy",
            65,
            &["b.npy: expected rows of shape [2], as in a.npy, got [3]"],
        ),
        (
            vec![("d.npz", npz(&[("x", x(4)), ("z", y(&[0, 1, 0, 1]))], false))],
            "d.npz",
            2,
            &["--data d.npz: expected labels", "z []"],
        ),
        (
            vec![("d.npz", npz(&[("x", x(4)), ("y", y(&[0, 1, 0, 1]))], false))],
            "d.npz#w",
            65,
            &["d.npz", "\"w\"", "x [2], y []"],
        ),
        (
            table("a,b,kind\n1,2,0\n3,,1\n"),
            "d.csv",
            65,
            &["d.csv", "line 3", "b"],
        ),
        (
            table("a,b,kind\n1,2,0\n3,4,1\n"),
            "d.csv#a,a",
            65,
            &["read d.csv: two of its features are called \"a\""],
        ),
        (
            table("c,c=x,kind\nx,2,0\ny,4,1\n"),
            "d.csv --categorical auto",
            65,
            &["read d.csv: two of its features are called \"c=x\""],
        ),
        (
            table("a,b,kind,\n1,2,0,\n3,4,1,\n"),
            "d.csv",
            65,
            &["column 4 of 4 has no name", "if lines end in a delimiter"],
        ),
        (
            table("sep=;\na;kind\n1;0\n3;1\n"),
            "d.csv",
            65,
            &["got \"sep=\"; help: remove lines above the names"],
        ),
        (
            table("a,kind\n1;0\n3;1\n"),
            "d.csv",
            65,
            &[
                "line 2: expected 2 cells",
                "put the delimiter of the header",
            ],
        ),
        (
            table("a\0,\0k\0\n\0p\0,\0q\0\n\0"),
            "d.csv",
            65,
            &["line 1: expected UTF-8, got NUL bytes, as UTF-16 has"],
        ),
        (
            table("a,kind\n1,x\n3,y\n"),
            "d.csv --task regression",
            65,
            &["d.csv, line 2, column", "got \"x\"", "--task regression"],
        ),
        (
            vec![
                ("d.csv", b"a,kind\n1,x\n3,y\n".to_vec()),
                ("v.csv", b"a,kind\n1,x\n3,z\n".to_vec()),
            ],
            "d.csv --val-data v.csv",
            65,
            &[
                "v.csv",
                "line 3, column",
                "expected one of the 2 classes",
                "got \"z\"; the classes are \"x\", \"y\"",
            ],
        ),
        (
            vec![
                ("d.csv", b"a,b,kind\n1,2,x\n3,4,y\n".to_vec()),
                ("v.csv", b"a,kind\n1,x\n3,y\n".to_vec()),
            ],
            "d.csv --val-data v.csv",
            65,
            &["v.csv", "b"],
        ),
    ]
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_whose_files_differ_say_in_what() {
    let x = |rows: usize, width: usize, bad: Option<usize>| {
        let number = |at: usize| {
            if bad == Some(at / width) {
                f32::NAN
            } else {
                at as f32
            }
        };
        npy(
            "<f4",
            &[rows, width],
            &(0..rows * width)
                .flat_map(|at| number(at).to_le_bytes())
                .collect::<Vec<u8>>(),
        )
    };
    let y = |rows: usize| {
        npy(
            "|u1",
            &[rows],
            &(0..rows).map(|row| row as u8 % 2).collect::<Vec<u8>>(),
        )
    };
    let bytes = npy("|u1", &[40, 3], &[1; 120]);
    let floats = npy(
        "<f4",
        &[40],
        &(0..40)
            .flat_map(|row| (row as f32 / 2.0).to_le_bytes())
            .collect::<Vec<u8>>(),
    );
    let table = |text: &str| vec![("d.csv", text.as_bytes().to_vec())];
    let xy = |x: Vec<u8>, y: Vec<u8>| vec![("x.npy", x), ("y.npy", y)];
    const XY: &str = "x.npy --labels y.npy";
    let here = || xy(x(40, 3, None), y(40));
    let cases: [(&str, Files, Files, i32, &[&str]); 6] = [
        (
            XY,
            here(),
            xy(x(60, 3, Some(50)), y(60)),
            78,
            &["the number of rows of --data x.npy", "has 60", "has 40"],
        ),
        (
            XY,
            here(),
            xy(x(40, 4, None), y(40)),
            78,
            &["the number of features of --data x.npy", "has 4", "has 3"],
        ),
        (
            XY,
            here(),
            xy(bytes, y(40)),
            78,
            &["the type of features of --data x.npy", "has u8", "has f32"],
        ),
        (
            XY,
            here(),
            xy(x(40, 3, None), floats),
            78,
            &["the labels of --data x.npy", "has 1 numbers", "has classes"],
        ),
        (
            "d.csv",
            table("a,b,kind\n1,2,0\n3,4,1\n"),
            table("b,a,kind\n1,2,0\n3,4,1\n"),
            78,
            &["the columns of --data d.csv", "has b", "has a"],
        ),
        // What one of them alone has, who looked at that row, is said by all as it says it.
        (
            XY,
            here(),
            xy(x(40, 3, Some(5)), y(40)),
            65,
            &["x.npy, row 5, feature 0: expected a finite f32, got NaN"],
        ),
    ];
    all_at_once(cases, |(data, first, second, code, named)| {
        let folder = Folder::new("differ");
        for (place, files) in [("first", first), ("second", second)] {
            files
                .into_iter()
                .for_each(|(name, bytes)| write(&folder, &format!("{place}/{name}"), bytes));
        }
        let words = format!("{TRAIN} {data} --normalize none");
        let ended = folder.in_folders(&["first", "second"], &words).run();
        assert_names(&ended, code, data, named);
        assert!(!folder.out().exists(), "nothing was begun: {ended}");
    });
}

/// A few are refused by two ranks, with one voice.
#[test]
fn what_is_wrong_with_files_is_named_once_and_nothing_is_begun() {
    let of_ranks = ddp_testing::cases_of("bad files for two ranks", bad(), 4);
    let jobs = bad().into_iter().map(|bad| (1, bad));
    let jobs = jobs.chain(of_ranks.into_iter().map(|bad| (2, bad)));
    all_at_once(jobs, |(ranks, (files, data, code, named))| {
        let folder = Folder::new("bad");
        for (name, bytes) in files {
            write(&folder, name, bytes);
        }
        let ended = job(&folder, ranks, &format!("{TRAIN} {data}")).run();
        assert_names(&ended, code, data, named);
        assert!(!folder.out().exists(), "nothing was begun: {ended}");
    });
}

#[track_caller]
fn assert_names(ended: &Ended, code: i32, data: &str, named: &[&str]) {
    let cause = ended.assert_fails(code);
    let missing: Vec<_> = named
        .iter()
        .filter(|part| !cause.contains(**part))
        .collect();
    assert!(
        missing.is_empty(),
        "--data {data}: {missing:?} is not in: {ended}"
    );
}

#[test]
fn fewer_rows_than_ranks_are_refused() {
    let folder = Folder::new("few");
    write(&folder, "d.csv", csv(0..3, number));
    let cause = folder.ranks(4, &format!("{TRAIN} d.csv")).run();
    let cause = cause.assert_fails(65);
    assert!(
        cause.contains("d.csv") && cause.contains("each of 4 ranks, got 3"),
        "{cause}"
    );
    folder
        .ranks(3, &format!("{TRAIN} d.csv"))
        .run()
        .assert_well();
}

#[test]
fn flags_of_files_and_of_built_in_data_are_not_mixed() {
    for (words, named) in [
        (
            "--labels y",
            &["--labels: expected files as --data, got glyphs"][..],
        ),
        (
            "--val-split 0.1",
            &["--val-split: expected files as --data"],
        ),
        ("--task regression", &["--task: expected files as --data"]),
        (
            "--val-data x.npy",
            &["--val-data: expected files as --data"],
        ),
        (
            "--data d.csv --val-data d.csv --val-split 0.1",
            &["--val-split 0.1 and --val-data d.csv exclude each other"],
        ),
        (
            "--data d.csv --val-labels y.npy",
            &["--val-labels y.npy: expected --val-data"],
        ),
        (
            "--data d.csv --val-data glyphs",
            &["--val-data glyphs: expected files", "held-out=N"],
        ),
        (
            "--data d.csv --labels y.npy --val-data v.csv",
            &["cannot open y.npy"],
        ),
    ] {
        let folder = Folder::new("mixed");
        write(&folder, "d.csv", csv(0..ROWS, number));
        let code = if named[0].starts_with("cannot") {
            74
        } else {
            2
        };
        assert_names(
            &folder.alone(&format!("{words} --out OUT")).run(),
            code,
            words,
            named,
        );
    }
}

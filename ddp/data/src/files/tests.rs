//! Every format and element, as other programs write them: `tests/golden/data`, made by
//! `tests/golden/make_data.py`.

mod claims;
pub(super) mod fvecs;
pub(super) mod made;

use std::fs::{self, File};
use std::path::PathBuf;

use serde_json::Value;

use std::path::Path;

use super::*;
use ddp_kernels::files::testing::Scratch;
use ddp_kernels::setting::Choice;

/// A file that numpy or safetensors wrote.
pub(super) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/data")
        .join(name)
}

fn expected() -> Value {
    serde_json::from_slice(&fs::read(golden("expected.json")).unwrap()).unwrap()
}

/// Writes a file of this name for one test.
pub(super) fn file(scratch: &Scratch, name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// The error of a file that is refused as bad data, and names it.
pub(super) fn refused(path: &Path) -> String {
    let cache = path.parent().unwrap().join("cache");
    let error = open(path, Some(&cache)).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 65, "{text}");
    assert!(
        text.contains(path.to_str().unwrap()),
        "{text} does not name {}",
        path.display()
    );
    text
}

fn check(array: &Array, element: &str, expected: &Value) {
    let about = format!("{array:?}");
    let expected = &expected["arrays"][element];
    let exact = expected["exact"].as_array().unwrap();
    assert_eq!(
        (array.rows(), array.row_shape(), array.element.name()),
        (3, &[2, 2][..], element),
        "{about}"
    );
    let (mut f32s, mut f64s, mut i64s) = ([0.0; 12], [0.0; 12], [0; 12]);
    array.read_f64(0, &mut f64s).unwrap();
    let wanted: Vec<f64> = exact.iter().map(|value| value.as_f64().unwrap()).collect();
    assert_eq!(f64s.map(f64::to_bits).to_vec(), bits(&wanted), "{about}");
    array.read_f32(0, &mut f32s).unwrap();
    let wanted: Vec<f64> = expected["f32"]
        .as_array()
        .unwrap()
        .iter()
        .map(|value| value.as_f64().unwrap())
        .collect();
    assert_eq!(
        f32s.map(|value| f64::from(value).to_bits()).to_vec(),
        bits(&wanted),
        "{about}"
    );
    match array.read_i64(0, &mut i64s) {
        Ok(()) => assert_eq!(
            i64s.to_vec(),
            exact
                .iter()
                .map(|x| x.as_i64().unwrap())
                .collect::<Vec<_>>(),
            "{about}"
        ),
        Err(error) => {
            assert_eq!(error.exit_code(), 65);
            let why = if element == "u64" {
                "row 0: expected at most 9223372036854775807, got 18446744073709551615"
            } else {
                "expected whole numbers"
            };
            assert!(
                (element == "u64" || array.element.is_float()) && error.to_string().contains(why),
                "{error}"
            );
        }
    }
    // Any rows, by themselves.
    let mut two = [0.0; 8];
    array.read_f32(1, &mut two).unwrap();
    assert_eq!(
        two.map(f32::to_bits),
        f32s[4..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()[..],
        "{about}"
    );
    if element == "u64" {
        array.read_i64(1, &mut i64s[..4]).unwrap();
        assert_eq!(i64s[0], exact[4].as_i64().unwrap());
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_element_of_every_format_is_read_as_it_was_written() {
    let (expected, scratch) = (expected(), Scratch::new());
    let elements: Vec<&str> = NumberType::ALL.iter().map(|(_, name, _)| *name).collect();
    for archive in ["little.npz", "big.npz", "packed.npz", "all.safetensors"] {
        let contents = open(&golden(archive), Some(scratch.path())).unwrap();
        assert!(
            contents.others.is_empty(),
            "{archive}: {:?}",
            contents.others
        );
        for element in elements
            .iter()
            .filter(|&&element| element != "bf16" || archive.ends_with(".safetensors"))
        {
            let array = contents.find(element).unwrap().unwrap();
            assert!(
                array.name().ends_with(&format!("{archive}#{element}")),
                "{}",
                array.name()
            );
            check(array, element, &expected);
        }
    }
    for element in elements.iter().filter(|&&element| element != "bf16") {
        check(
            &open(&golden(&format!("{element}.npy")), None)
                .unwrap()
                .arrays[0],
            element,
            &expected,
        );
    }
    for element in ["u8", "i8", "i16", "i32", "f32", "f64"] {
        check(
            &open(&golden(&format!("{element}-idx3-ubyte")), None)
                .unwrap()
                .arrays[0],
            element,
            &expected,
        );
    }
    let columns = open(&golden("columns.npy"), Some(scratch.path())).unwrap();
    check(&columns.arrays[0], "f64", &expected);
    for packed in ["f32-idx3-ubyte.gz", "f32.npy.gz"] {
        check(
            &open(&golden(packed), Some(scratch.path())).unwrap().arrays[0],
            "f32",
            &expected,
        );
    }
}

#[test]
fn what_can_be_mapped_is_read_where_it_lies() {
    let scratch = Scratch::new();
    let path = file(&scratch, "a.npz", &fs::read(golden("little.npz")).unwrap());
    let contents = open(&path, None).unwrap();
    assert!(
        contents
            .arrays
            .iter()
            .all(|array| array.mapped.path() == path)
    );
    assert_eq!(scratch.names(), ["a.npz"], "no cache was made");
}

#[test]
fn what_is_converted_is_converted_once() {
    let scratch = Scratch::new();
    let places = |_| {
        let contents = open(&golden("packed.npz"), Some(scratch.path())).unwrap();
        let mapped = contents.arrays[0].mapped.clone();
        (mapped.path().to_path_buf(), mapped.identity())
    };
    let [first, second] = [0, 1].map(places);
    assert!(
        first.0.starts_with(scratch.path()) && first == second,
        "{first:?} {second:?}"
    );
}

#[test]
fn what_is_no_array_of_numbers_is_refused_with_help() {
    let scratch = Scratch::new();
    for (name, why) in [
        (
            "objects.npy",
            "a pickle, which can run programs when it is read; help: np.save",
        ),
        (
            "texts.npy",
            "texts; help: save classes as numbers: np.unique(a, return_inverse=True)",
        ),
        (
            "number.npy",
            "expected an array of rows, got a single number",
        ),
        ("empty.npy", "it is empty: its shape is [0, 4]"),
        ("model.pt", "torch.save"),
    ] {
        let path = file(&scratch, name, &fs::read(golden(name)).unwrap());
        let text = refused(&path);
        assert!(text.contains(why), "{text}\n  lacks: {why}");
    }
    let zip = fs::read(golden("model.pt")).unwrap();
    for (name, bytes, why) in [
        (
            "renamed.npz",
            &zip[..],
            "it is a pickle (as torch.save writes)",
        ),
        (
            "old.pt",
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
            "it is a pickle",
        ),
        ("any.pkl", b"\x80\x04K\x03.", "it is a pickle"),
        ("no.ending", b"\x80\x04K\x03.", "it is a pickle"),
        ("a.h5", b"\x89HDF\r\n\x1a\n and so on", "HDF5 is not read"),
        (
            "a.mat",
            b"MATLAB 5.0 MAT-file, Platform: GLNXA64",
            "MATLAB files are not read",
        ),
        (
            "a.feather",
            b"ARROW1\0\0 and so on",
            "Arrow (Feather) files are not read",
        ),
        (
            "a.png",
            b"\x89PNG\r\n\x1a\n and so on",
            "it is a single picture; help: put all pictures into one array",
        ),
        ("a.xlsx", b"damaged", "Excel workbooks are not read"),
        (
            "b.xlsx",
            b"PK\x03\x04cut short",
            "Excel workbooks are not read",
        ),
        ("a.parquet", b"PAR1 cut short", "it is cut short, damaged"),
        ("nothing.npy", b"", "it is empty"),
        ("nothing", b"", "it is empty"),
        (
            "text.npy",
            b"1,2,3\n4,5,6\n",
            "it begins with \"1,2,3\\n4,\"; expected \"\\x93NUMPY\"",
        ),
        (
            "numbers.bin",
            &[0x3f; 4000],
            "numbers without a header do not say what they are: save them with np.save",
        ),
        ("a.xyz", b"what is this?", "expected .npy, .npz, .csv"),
        (
            "a.json",
            b"[{\"x\": 1}]",
            "help: pandas.read_json(path).to_csv(other, index=False)",
        ),
        (
            "b.json",
            b"{\"x\": 1}\n{\"x\": 2}\n",
            "help: pandas.read_json(path, lines=True).to_csv(",
        ),
        ("c.json", b" [\n{\"messages\": []}]", "jq -c '.[]'"),
        (
            "d.json",
            b"{\"prompt\": \"a\"}",
            "help: rename it to .jsonl",
        ),
        ("table.csv", b"a,b\n1,2\n", "expected a file of arrays"),
        (
            "table.txt",
            b"a,b\n1,2\n",
            "got a text; help: rename a table of text to .csv",
        ),
    ] {
        let text = refused(&file(&scratch, name, bytes));
        assert!(text.contains(why), "{text}\n  lacks: {why}");
    }
    let text = refused(scratch.path());
    assert!(
        text.contains("it is a directory; expected an ordinary file"),
        "{text}"
    );
    let missing = open(&scratch.path().join("missing.npy"), None).unwrap_err();
    assert!(
        missing.exit_code() == 74 && missing.to_string().contains("missing.npy"),
        "{missing}"
    );
}

#[test]
fn an_array_that_cannot_be_used_does_not_hide_the_others() {
    let contents = open(&golden("mixed.npz"), None).unwrap();
    assert_eq!(
        contents
            .arrays
            .iter()
            .map(|array| &*array.key)
            .collect::<Vec<_>>(),
        ["x"]
    );
    assert!(
        contents
            .find("names")
            .unwrap_err()
            .contains("got dtype '|O'")
    );
    assert!(
        contents
            .find("epochs")
            .unwrap_err()
            .contains("a single number")
    );
    assert!(contents.find("y").unwrap().is_none());
}

#[test]
fn first_bytes_say_what_a_file_is_whatever_it_is_called() {
    let scratch = Scratch::new();
    for (from, expected) in [
        ("f32.npy", &numpy::NPY),
        ("little.npz", &numpy::NPZ),
        ("all.safetensors", &safetensors::SAFETENSORS),
        ("f64-idx3-ubyte", &idx::IDX),
        ("f32.npy.gz", &GZIP),
    ] {
        for name in ["data", "data.csv", "data.bin", "data.npy"] {
            let path = file(&scratch, name, &fs::read(golden(from)).unwrap());
            assert!(format(&path).unwrap().is(expected), "{from} as {name}");
        }
    }
    for (name, bytes, expected) in [
        ("a.csv", &b"a,b\n"[..], &tables::CSV),
        ("A.CSV", b"a,b\n", &tables::CSV),
        ("a.tsv", b"a\tb\n", &tables::CSV),
        ("a.csv.gz", b"\x1f\x8b\x08", &tables::CSV),
        ("a.data", b"PAR1....\x01\0\0\0PAR1", &tables::PARQUET),
        // Columns may be called as other files begin, and labels as they end.
        ("a.csv", b"PAR1,PAR2\n1,2\n", &tables::CSV),
        ("a.csv", b"PAR1,y\n1,PAR1", &tables::CSV),
        ("a.csv", b"MATLAB score,y\n1,2\n", &tables::CSV),
        ("a-idx1-ubyte", b"\x01", &idx::IDX),
        ("b.csv", b"\0\0\x08\x03", &idx::IDX),
    ] {
        let path = file(&scratch, name, bytes);
        assert!(format(&path).unwrap().is(expected), "{name}");
    }
}

/// The small files that are damaged in turn.
const SMALL: [&str; 6] = [
    "f32.npy",
    "bool.npy",
    "mixed.npz",
    "packed.npz",
    "all.safetensors",
    "f32-idx3-ubyte",
];

#[test]
fn every_truncation_is_refused_and_names_the_file() {
    let scratch = Scratch::new();
    for name in SMALL.into_iter().chain(["f32.npy.gz"]) {
        let whole = fs::read(golden(name)).unwrap();
        for length in 0..whole.len() {
            refused(&file(&scratch, name, &whole[..length]));
        }
        // An archive is found from its end, and may have anything around it.
        if !name.ends_with(".npz") {
            refused(&file(&scratch, name, &[&whole[..], b"\0"].concat()));
        }
    }
}

/// Opens, reads whatever can be read, and says how many numbers that is.
fn read_all(path: &Path, cache: &Path) -> Result<usize> {
    let contents = open(path, Some(cache))?;
    let mut count = 0;
    for array in &contents.arrays {
        let elements = array.row_elements * array.rows() as usize;
        array.read_f32(0, &mut vec![0.0; elements])?;
        count += elements;
    }
    Ok(count)
}

#[test]
fn every_changed_byte_gives_no_more_numbers_than_the_file_has_or_is_refused() {
    let scratch = Scratch::new();
    for name in SMALL {
        let whole = fs::read(golden(name)).unwrap();
        let cache = scratch.path().join("cache");
        let most = read_all(&golden(name), &cache).unwrap();
        // Converted files are slow, because each change is converted and synced: fewer positions.
        let is_converted = name == "packed.npz";
        let some = whole.len() / if is_converted { 20 } else { 4 };
        for position in ddp_testing::cases(name, whole.len(), some) {
            let byte = whole[position];
            let values = [
                byte ^ 1,
                0xff,
                0,
                1,
                0x7f,
                0x80,
                byte ^ 0x40,
                byte.wrapping_add(1),
            ];
            for &value in &values[..if is_converted { 2 } else { 8 }] {
                let mut changed = whole.clone();
                changed[position] = value;
                let path = file(&scratch, name, &changed);
                match read_all(&path, &cache) {
                    // Half as wide numbers are twice as many.
                    Ok(count) => assert!(
                        count <= 8 * most,
                        "{name}: byte {position} as {value}: {count} numbers"
                    ),
                    Err(error) => {
                        assert_eq!(
                            error.exit_code(),
                            65,
                            "{name}: byte {position} as {value}: {error}"
                        );
                        assert!(error.to_string().contains(name), "{error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_file_cut_short_while_it_is_used_is_an_error_that_names_it() {
    let scratch = Scratch::new();
    let path = file(&scratch, "a.npy", &fs::read(golden("f64.npy")).unwrap());
    let array = open(&path, None).unwrap().arrays.remove(0);
    let mut row = [0.0; 4];
    array.read_f32(2, &mut row).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(0)
        .unwrap();
    for _ in 0..2 {
        let error = array.read_f32(2, &mut row).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        let text = error.to_string();
        assert!(
            text.contains("a.npy: it was cut short while it was in use") && text.contains("rename"),
            "{text}"
        );
    }
}

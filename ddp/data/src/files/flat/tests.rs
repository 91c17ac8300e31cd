use std::fs;

use super::open as open_named;
use super::*;
use crate::files::tests::{file, refused};
use ddp_kernels::files::testing::Scratch;
use ddp_kernels::setting::Choice;

fn open(path: &Path) -> Result<Contents> {
    open_named(path, &path.display().to_string())
}

/// A small file of two arrays, with all that can be said of them.
fn small(scratch: &Scratch) -> PathBuf {
    let path = scratch.path().join("small.bin");
    let _ = fs::remove_file(&path);
    write(&path, |writer| {
        writer.begin("features", NumberType::F32, &[2])?;
        writer.write_numbers(&[1.0, 2.0, 3.0], f32::to_le_bytes)?;
        writer.write_numbers(&[4.0], f32::to_le_bytes)?;
        writer.begin("labels", NumberType::I64, &[])?;
        writer.write_numbers(&[1, 0], i64::to_le_bytes)?;
        Ok(About {
            classes: Some(vec!["cat".into(), "dog".into()]),
            columns: Some(vec!["width".into(), "height".into()]),
            source: Some("pets.csv".into()),
            ..About::default()
        })
    })
    .unwrap();
    path
}

/// The file with another header, whose checksum is right.
fn with_header(whole: &[u8], change: impl FnOnce(String) -> String) -> Vec<u8> {
    let start = u64::from_le_bytes(whole[8..16].try_into().unwrap()) as usize;
    let json = change(String::from_utf8(whole[start..].to_vec()).unwrap());
    let mut crc = Crc::new();
    crc.update(json.as_bytes());
    let mut changed = [&whole[..start], json.as_bytes()].concat();
    changed[16..24].copy_from_slice(&(json.len() as u64).to_le_bytes());
    changed[24..28].copy_from_slice(&crc.sum().to_le_bytes());
    changed
}

#[test]
fn what_is_written_is_read_with_all_that_is_said_of_it() {
    let scratch = Scratch::new();
    let path = small(&scratch);
    let contents = open(&path).unwrap();
    let features = contents.find("features").unwrap().unwrap();
    assert_eq!(
        (features.rows(), features.row_shape(), features.element),
        (2, &[2][..], NumberType::F32)
    );
    assert!(features.name().ends_with("small.bin#features"));
    let (mut x, mut y) = ([0.0; 4], [0; 2]);
    features.read_f32(0, &mut x).unwrap();
    contents
        .find("labels")
        .unwrap()
        .unwrap()
        .read_i64(0, &mut y)
        .unwrap();
    assert_eq!((x, y), ([1.0, 2.0, 3.0, 4.0], [1, 0]));
    assert_eq!(contents.about.classes.unwrap(), ["cat", "dog"]);
    assert_eq!(contents.about.columns.unwrap(), ["width", "height"]);
    verify(&path).unwrap();
    assert!(crate::files::format(&path).unwrap().is(&FLAT));
    assert_eq!(
        write(&path, |_| Ok(About::default()))
            .unwrap_err()
            .exit_code(),
        74,
        "nothing is written over"
    );
}

#[test]
fn every_element_survives_a_round_trip() {
    let scratch = Scratch::new();
    for (index, &(element, name, _)) in NumberType::ALL.iter().enumerate() {
        let path = scratch.path().join(format!("{index}.bin"));
        // Patterns that are small whole numbers, in pieces that are not whole numbers.
        let values: Vec<u8> = (0..3000).map(|value| (value % 2) as u8).collect();
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|&value| number(element, value))
            .collect();
        write(&path, |writer| {
            writer.begin("x", element, &[3, 5])?;
            bytes.chunks(7).try_for_each(|piece| writer.write(piece))?;
            Ok(About::default())
        })
        .unwrap();
        verify(&path).unwrap();
        let array = open(&path).unwrap().arrays.remove(0);
        assert_eq!((array.rows(), array.element.name()), (200, name));
        let mut read = vec![0.0; 3000];
        array.read_f32(0, &mut read).unwrap();
        assert!(
            read.iter()
                .zip(&values)
                .all(|(&got, &value)| got == f32::from(value)),
            "{element}"
        );
        let mut doubles = vec![0.0; 3000];
        array.read_f64(0, &mut doubles).unwrap();
        assert!(
            doubles
                .iter()
                .zip(&values)
                .all(|(&got, &value)| got == f64::from(value)),
            "{element}"
        );
    }
}

/// 0 or 1 as the bytes of an element.
fn number(element: NumberType, value: u8) -> Vec<u8> {
    match element {
        NumberType::F16 => (u16::from(value) * 0x3c00).to_le_bytes().to_vec(),
        NumberType::BF16 => (u16::from(value) * 0x3f80).to_le_bytes().to_vec(),
        NumberType::F32 => f32::from(value).to_le_bytes().to_vec(),
        NumberType::F64 => f64::from(value).to_le_bytes().to_vec(),
        whole => u64::from(value).to_le_bytes()[..whole.bytes()].to_vec(),
    }
}

#[test]
fn a_file_that_another_program_wrote_is_read() {
    let scratch = Scratch::new();
    // Header first, no checksums of arrays.
    let json = br#"{"arrays": [{"name": "x", "element": "u8", "shape": [2, 3], "offset": 192}]}"#;
    let mut crc = Crc::new();
    crc.update(json);
    let mut bytes = [
        MAGIC,
        &64u64.to_le_bytes(),
        &(json.len() as u64).to_le_bytes(),
        &crc.sum().to_le_bytes(),
    ]
    .concat();
    bytes.resize(64, 0);
    bytes.extend(json);
    bytes.resize(192, 0);
    bytes.extend([1, 2, 3, 4, 5, 6]);
    let path = file(&scratch, "other.bin", &bytes);
    let mut x = [0.0; 3];
    open(&path).unwrap().arrays[0].read_f32(1, &mut x).unwrap();
    assert_eq!(x, [4.0, 5.0, 6.0]);
    verify(&path).unwrap();
}

#[test]
fn every_truncation_and_every_changed_byte_is_found() {
    let scratch = Scratch::new();
    let path = small(&scratch);
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        refused(&file(&scratch, "a.bin", &whole[..length]));
    }
    let header = u64::from_le_bytes(whole[8..16].try_into().unwrap()) as usize;
    for position in 0..whole.len() {
        let mut changed = whole.clone();
        changed[position] ^= 1 << (position % 8);
        let path = file(&scratch, "a.bin", &changed);
        match open(&path) {
            Ok(_) => {
                assert!(
                    (64..header).contains(&position),
                    "byte {position} is not a number of an array"
                );
                // Between the arrays nothing means anything.
                assert!(
                    (80..128).contains(&position) || verify(&path).is_err(),
                    "byte {position}"
                );
            }
            Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
        }
    }
}

#[test]
fn wrong_headers_with_a_valid_checksum_are_refused() {
    let scratch = Scratch::new();
    let whole = fs::read(small(&scratch)).unwrap();
    for (from, to, why) in [
        (
            "[2,2]",
            "[20000000000,2]",
            "its header claims features, f32[20000000000, 2], up to byte 160000000064, but the file has",
        ),
        ("[2,2]", "[4294967296,4294967296]", "is beyond any file"),
        ("[2,2]", "[-2,2]", "cannot be read"),
        ("[2,2]", "[2,2.0]", "cannot be read"),
        ("[2,2]", "[0,2]", "it is empty"),
        ("\"f32\"", "\"f31\"", "unknown variant `f31`"),
        (
            "\"offset\":64",
            "\"offset\":18446744073709551552",
            "up to byte 18446744073709551568, but the file has",
        ),
        (
            "\"features\"",
            "\"labels\"",
            "two of its arrays are called \"labels\"",
        ),
        (
            "\"source\"",
            "\"sauce\"",
            "cannot be read: unknown field `sauce`",
        ),
        ("{\"arrays\"", "[\"arrays\"", "cannot be read"),
    ] {
        let changed = with_header(&whole, |json| {
            assert!(json.contains(from), "{json} lacks {from}");
            json.replacen(from, to, 1)
        });
        let path = file(&scratch, "a.bin", &changed);
        match open(&path) {
            // One array of two that is empty is not there.
            Ok(contents) => assert!(contents.find("features").unwrap_err().contains(why), "{to}"),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    error.exit_code() == 65 && text.contains(why),
                    "{to}: {text}"
                );
            }
        }
    }
    let none = with_header(&whole, |_| r#"{"arrays":[]}"#.into());
    assert!(refused(&file(&scratch, "a.bin", &none)).contains("it holds no arrays"));
}

#[test]
fn a_header_too_long_to_be_read_is_not_written() {
    let scratch = Scratch::new();
    let path = scratch.path().join("a.bin");
    let error = write(&path, |writer| {
        writer.begin("x", NumberType::U8, &[])?;
        writer.write(&[1])?;
        let classes = vec!["c".repeat(1 << 20); 64];
        Ok(About {
            classes: Some(classes),
            source: Some("pets.csv".into()),
            ..About::default()
        })
    });
    let error = error.unwrap_err();
    assert!(
        error.exit_code() == 65
            && error
                .to_string()
                .contains("cannot read pets.csv: the names of its"),
        "{error}"
    );
}

#[test]
fn a_partly_written_file_cannot_be_opened() {
    let scratch = Scratch::new();
    let path = scratch.path().join("half.bin");
    let error = write(&path, |writer| {
        writer.begin("x", NumberType::U8, &[])?;
        writer.write(&[1; 5000])?;
        Err(Error::Data("torn".into()))
    });
    assert_eq!(error.unwrap_err().to_string(), "torn");
    assert!(open(&path).is_err(), "its first bytes are written last");
}

#[test]
fn a_full_disk_is_an_error_that_names_the_file_and_the_help() {
    let error = write(Path::new("/proc/nowhere.bin"), |_| Ok(About::default())).unwrap_err();
    assert_eq!(error.exit_code(), 74);
    assert!(
        error.to_string().contains("/proc/nowhere.bin")
            && error.to_string().contains("`cache-dir`"),
        "{error}"
    );
}

#[test]
fn names_that_are_given_twice_are_refused() {
    let scratch = Scratch::new();
    let whole = fs::read(small(&scratch)).unwrap();
    for (from, to, why) in [
        (
            r#""width","height""#,
            r#""width","width""#,
            "two of its columns are called \"width\"",
        ),
        (
            r#""cat","dog""#,
            r#""cat","cat""#,
            "two of its classes are called \"cat\"",
        ),
    ] {
        let changed = with_header(&whole, |json| {
            assert!(json.contains(from), "{json}");
            json.replace(from, to)
        });
        let text = refused(&file(&scratch, "a.bin", &changed));
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_flipped_byte_of_an_array_is_found_wherever_the_file_is_used() {
    let scratch = Scratch::new();
    let mut whole = fs::read(small(&scratch)).unwrap();
    whole[ALIGNMENT as usize + 2] ^= 1;
    let text = refused(&file(&scratch, "a.bin", &whole));
    assert!(text.contains("the checksum of features"), "{text}");
}

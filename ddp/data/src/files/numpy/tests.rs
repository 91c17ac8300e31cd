use std::fs;
use std::io::{Cursor, Write};

use zip::write::{SimpleFileOptions, ZipWriter};

use super::*;
use crate::files::open;
use crate::files::tests::made::npy;
use crate::files::tests::{file, golden, refused};
use ddp_kernels::files::testing::Scratch;

fn archive(method: CompressionMethod, members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        writer
            .start_file(
                *name,
                SimpleFileOptions::default().compression_method(method),
            )
            .unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// Where the directory's entry for the member at `index` begins.
fn directory_entry(bytes: &[u8], index: usize) -> usize {
    let starts = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, window)| *window == b"PK\x01\x02");
    starts.map(|(start, _)| start).nth(index).unwrap()
}

/// Changes four bytes of a directory's entry, `at` bytes from its beginning.
fn patched(mut bytes: Vec<u8>, index: usize, at: usize, value: u32) -> Vec<u8> {
    let at = directory_entry(&bytes, index) + at;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

const PACKED_BYTES: usize = 20;
const BYTES: usize = 24;
const LOCAL_HEADER: usize = 42;

#[test]
fn a_bomb_is_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    let (deflated, stored) = (CompressionMethod::Deflated, CompressionMethod::Stored);
    let honest = archive(deflated, &[("x.npy", &npy("<f4", false, "(1000,)", 4000))]);
    let twice = archive(
        deflated,
        &[
            ("x.npy", &npy("<f4", false, "(9,)", 36)),
            ("y.npy", &npy("<f4", false, "(9,)", 36)),
        ],
    );
    for (name, bytes, why) in [
        // The directory claims what deflate cannot do.
        (
            "claim.npz",
            patched(honest.clone(), 0, BYTES, 4_000_000_000),
            "more than deflate can: it is damaged or a zip bomb",
        ),
        // It claims what deflate could do, and the member's own header does not.
        (
            "differ.npz",
            patched(honest.clone(), 0, BYTES, 50_000),
            "its header claims f32[1000] = 4128 bytes with the header, but it has 50000",
        ),
        // The member's header claims more than the directory.
        (
            "header.npz",
            archive(
                deflated,
                &[("x.npy", &npy("<f4", false, "(1000000000000,)", 4000))],
            ),
            "but it has 4128",
        ),
        (
            "columns.npz",
            archive(
                stored,
                &[("x.npy", &npy("<f4", true, "(1000000, 1000000)", 4000))],
            ),
            "but it has 4128",
        ),
        // Two members that are the same bytes: each more costs 46 bytes and unpacks to all of it
        // again.
        (
            "overlap.npz",
            patched(twice.clone(), 1, LOCAL_HEADER, 0),
            "its members share bytes: it is damaged or a zip bomb",
        ),
        (
            "packed.npz",
            patched(
                archive(stored, &[("x.npy", &npy("<f4", false, "(1000,)", 4000))]),
                0,
                PACKED_BYTES,
                4_000_000,
            ),
            "damaged",
        ),
        (
            "stored.npz",
            patched(
                archive(stored, &[("x.npy", &npy("<f4", false, "(1000,)", 4000))]),
                0,
                BYTES,
                4_000_000,
            ),
            "is stored, but claims",
        ),
    ] {
        let path = file(&scratch, name, &bytes);
        let text = refused(&path);
        assert!(text.contains(why), "{name}: {text}\n  lacks: {why}");
        fs::remove_file(path).unwrap();
        assert!(scratch.names().is_empty(), "{name}: {:?}", scratch.names());
    }
    // And what is honest is read, though it is mostly zeros.
    let path = file(&scratch, "honest.npz", &honest);
    let contents = open(&path, Some(&scratch.path().join("cache"))).unwrap();
    assert_eq!(contents.arrays[0].rows(), 1000);
}

#[test]
fn a_packed_member_that_differs_from_its_checksum_is_refused_and_not_kept() {
    let scratch = Scratch::new();
    let whole = fs::read(golden("packed.npz")).unwrap();
    // Values that hardly compress, so that a changed byte changes a value.
    let values: Vec<u8> = (0..4000u32)
        .map(|value| (value.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut bytes = archive(
        CompressionMethod::Deflated,
        &[(
            "x.npy",
            &[&npy("<f4", false, "(1000,)", 0)[..], &values].concat(),
        )],
    );
    let checksum = directory_entry(&bytes, 0) + 16;
    bytes[checksum] ^= 1;
    let cache = scratch.path().join("cache");
    for attempt in 0..2 {
        let path = file(&scratch, "a.npz", &bytes);
        let error = open(&path, Some(&cache)).unwrap_err();
        assert!(
            error.exit_code() == 65 && error.to_string().contains("x: Invalid checksum"),
            "{attempt}: {error}"
        );
    }
    open(&file(&scratch, "b.npz", &whole), Some(&cache)).unwrap();
}

#[test]
fn members_that_are_no_arrays_are_named() {
    let scratch = Scratch::new();
    let x = npy("<f4", false, "(2, 3)", 24);
    let members: [(&str, &[u8]); 3] = [("x.npy", &x), ("readme.txt", b"hello"), ("deep/y.npy", &x)];
    let path = file(
        &scratch,
        "a.npz",
        &archive(CompressionMethod::Stored, &members),
    );
    let contents = open(&path, None).unwrap();
    assert_eq!(
        contents
            .arrays
            .iter()
            .map(|array| &*array.key)
            .collect::<Vec<_>>(),
        ["x", "deep/y"]
    );
    assert_eq!(
        contents.others,
        [(
            "readme.txt".to_string(),
            "it is not an .npy file".to_string()
        )]
    );
    let none = file(
        &scratch,
        "none.npz",
        &archive(CompressionMethod::Stored, &[("sheet.xml", b"<a/>")]),
    );
    assert!(refused(&none).contains("sheet.xml: it is not an .npy file"));
    let empty = file(
        &scratch,
        "empty.npz",
        &archive(CompressionMethod::Stored, &[]),
    );
    assert!(refused(&empty).contains("it holds no arrays"));
}

#[test]
fn a_name_that_comes_twice_is_refused() {
    let scratch = Scratch::new();
    let x = npy("<f4", false, "(2, 3)", 24);
    let mut bytes = archive(CompressionMethod::Stored, &[("x.npy", &x), ("y.npy", &x)]);
    let name = directory_entry(&bytes, 1) + 46;
    bytes[name] = b'x';
    assert!(
        refused(&file(&scratch, "a.npz", &bytes)).contains("two of its members have the same name")
    );
}

#[test]
fn a_flipped_byte_of_a_stored_member_is_found() {
    let scratch = Scratch::new();
    let member = npy("<f4", false, "(6, 2)", 48);
    let mut bytes = archive(CompressionMethod::Stored, &[("x.npy", &member)]);
    let path = file(&scratch, "x.npz", &bytes);
    open(&path, None).unwrap();
    let data = bytes
        .windows(8)
        .position(|window| window == [0; 8])
        .unwrap();
    bytes[data + 4] ^= 0x40;
    fs::write(&path, &bytes).unwrap();
    let text = refused(&path);
    assert!(text.contains("x.npy: its CRC-32 is wrong"), "{text}");
}

#[test]
fn a_workbook_is_named() {
    let scratch = Scratch::new();
    let bytes = archive(CompressionMethod::Stored, &[("xl/workbook.xml", b"<x/>")]);
    let path = file(&scratch, "t.xlsx", &bytes);
    let text = refused(&path);
    assert!(
        text.contains("Excel workbooks are not read; help: save the sheet as .csv"),
        "{text}"
    );
}

#[test]
fn arrays_in_fortran_order_have_the_same_rows() {
    let scratch = Scratch::new();
    let cache = scratch.path().join("cache");
    // Numbers in C order are 0, 1, 2 …; in Fortran order the first index varies fastest.
    let shape = [3, 2, 4];
    let place = |number: usize| [number % 3, number / 3 % 2, number / 6];
    let value = |number: usize| {
        let [a, b, c] = place(number);
        (a * 2 + b) * 4 + c
    };
    let stored = |descr: &str, shape: &str, number: &dyn Fn(usize) -> Vec<u8>| {
        let mut bytes = npy(descr, true, shape, 0);
        (0..24).for_each(|at| bytes.extend(number(value(at))));
        bytes
    };
    let long = stored("<f4", "(3, 2, 4)", &|x| (x as f32).to_le_bytes().to_vec());
    let big = stored(">i2", "(3, 2, 4)", &|x| (x as i16).to_be_bytes().to_vec());
    let pairs = [("x.npy", &long[..]), ("y.npy", &big[..])];
    let files = [
        ("a.npy", long.clone(), ""),
        ("b.npy", big.clone(), ""),
        ("c.npz", archive(CompressionMethod::Stored, &pairs), "y"),
        ("d.npz", archive(CompressionMethod::Deflated, &pairs), "x"),
    ];
    for (name, bytes, key) in files {
        let contents = open(&file(&scratch, name, &bytes), Some(&cache)).unwrap();
        let array = contents.find(key).unwrap().unwrap();
        assert_eq!(
            (array.rows(), array.row_shape()),
            (3, &shape[1..]),
            "{name}"
        );
        let mut numbers = [0.0; 24];
        array.read_f32(0, &mut numbers).unwrap();
        let expected: Vec<f32> = (0..24u8).map(f32::from).collect();
        assert_eq!(numbers[..], expected, "{name}");
        array.read_f32(2, &mut numbers[..8]).unwrap();
        assert_eq!(numbers[..8], expected[16..], "{name}");
    }
}

use std::fs;

use flate2::Compression;
use flate2::write::GzEncoder;

use std::io::Write;

use super::*;
use crate::files::{DataFile, unpacked};
use ddp_kernels::files::testing::Scratch;

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// IDX of bytes, of one dimension.
fn idx(claimed: u32, bytes: &[u8]) -> Vec<u8> {
    [&[0, 0, 8, 1][..], &claimed.to_be_bytes(), bytes].concat()
}

/// What is unpacked of these bytes, and what is left in the folder.
fn unpack_all(bytes: &[u8]) -> (Result<Vec<u8>>, Vec<String>) {
    let scratch = Scratch::new();
    let path = scratch.path().join("train-idx1-ubyte.gz");
    fs::write(&path, bytes).unwrap();
    let cache = scratch.path().join("cache");
    let unpacked = unpacked(&DataFile::new(
        &path,
        &path.display().to_string(),
        Some(&cache),
    ));
    let left = fs::read_dir(&cache).map_or(vec![], |entries| {
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    });
    let content = unpacked.map(|path| fs::read(path).unwrap());
    (content, left)
}

#[track_caller]
fn assert_refused(bytes: &[u8], part: &str) {
    let (content, left) = unpack_all(bytes);
    let error = content.unwrap_err();
    assert!(
        error.exit_code() == 65 && error.to_string().contains(part),
        "{error}"
    );
    assert_eq!(left, [""; 0], "{error}");
}

#[test]
fn an_array_comes_out_as_it_went_in() {
    let array = idx(3000, &[7; 3000]);
    assert_eq!(unpack_all(&packed(&array)).0.unwrap(), array);
    assert_eq!(
        unpack_all(&[packed(&array[..5]), packed(&array[5..])].concat())
            .0
            .unwrap(),
        array
    );
}

#[test]
fn gzip_files_of_other_content_are_not_unpacked() {
    assert_refused(&packed(b"hello, world"), "got \"hello, w\"");
    assert_refused(&packed(b""), "gzip -t");
}

#[test]
fn damaged_gzip_is_bad_data() {
    let whole = packed(&idx(
        3000,
        &(0..3000u32)
            .map(|i| ((i * i) >> 3) as u8)
            .collect::<Vec<_>>(),
    ));
    for end in [2, 12, whole.len() / 2, whole.len() - 1] {
        assert_refused(&whole[..end], "gzip -t");
    }
    let mut damaged = whole.clone();
    let crc = damaged.len() - 8;
    damaged[crc] ^= 1;
    assert_refused(&damaged, "gzip -t");
    assert_refused(b"no gzip at all", "gzip -t");
    for junk in [&b"xy"[..], b"more than a header of gzip"] {
        let says = "followed by other bytes, which gzip -t reports and gzip -d ignores";
        assert_refused(&[&whole[..], junk].concat(), says);
    }
}

#[test]
fn a_bomb_is_refused() {
    // 300 MiB of ends of lines, which no table has.
    let bytes = 300 << 20;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    io::copy(&mut io::repeat(b'\n').take(bytes), &mut encoder).unwrap();
    let scratch = Scratch::new();
    let path = scratch.path().join("bomb.csv.gz");
    fs::write(&path, encoder.finish().unwrap()).unwrap();
    let error = io::copy(&mut reader(&path).unwrap(), &mut io::sink()).unwrap_err();
    let error = unreadable(&path, error);
    assert!(
        error.exit_code() == 65 && error.to_string().contains("like a decompression bomb"),
        "{error}"
    );
}

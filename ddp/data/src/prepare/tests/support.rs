//! Files of arrays for the tests of `prepare`. Also part of the tests of `ddp-tables`.

use std::fs;
use std::path::{Path, PathBuf};

use ddp_kernels::files::testing::Scratch;

use super::{DataRequest, Dataset, read_rows};

pub(crate) fn npy(
    scratch: &Scratch,
    name: &str,
    descr: &str,
    shape: &[usize],
    data: &[u8],
) -> PathBuf {
    let shape: String = shape.iter().map(|size| format!("{size},")).collect();
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    header.push_str(&" ".repeat((64 - (10 + header.len() + 1) % 64) % 64));
    header.push('\n');
    let path = scratch.path().join(name);
    let length = (header.len() as u16).to_le_bytes();
    fs::write(
        &path,
        [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat(),
    )
    .unwrap();
    path
}

pub(crate) fn bytes<T: Copy, const N: usize>(
    numbers: &[T],
    to_bytes: impl Fn(T) -> [u8; N],
) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|&number| to_bytes(number))
        .collect()
}

pub(crate) fn floats(scratch: &Scratch, name: &str, rows: &[&[f32]]) -> PathBuf {
    npy(
        scratch,
        name,
        "<f4",
        &[rows.len(), rows[0].len()],
        &bytes(&rows.concat(), f32::to_le_bytes),
    )
}

pub(crate) fn whole(scratch: &Scratch, name: &str, labels: &[i64]) -> PathBuf {
    npy(
        scratch,
        name,
        "<i8",
        &[labels.len()],
        &bytes(labels, i64::to_le_bytes),
    )
}

pub(crate) fn request(data: &Path, labels: Option<&Path>) -> DataRequest {
    let mut request = DataRequest::new(data.to_str().unwrap().parse().unwrap());
    request.labels = labels.map(|labels| labels.to_str().unwrap().to_string());
    request
}

/// All rows and their classes.
pub(crate) fn all(data: &dyn Dataset) -> Vec<(Vec<f32>, i64)> {
    let row = |row| {
        let [x, class] = read_rows(data, &[row]).unwrap();
        (x.to_vec().unwrap(), class.to_vec().unwrap()[0])
    };
    (0..data.rows()).map(row).collect()
}

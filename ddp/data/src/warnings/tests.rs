//! Which columns f32 rounds too much.

use std::fs;

use super::*;
use crate::files;
use ddp_kernels::files::testing::Scratch;

#[test]
fn rows_of_arrays_are_looked_at_as_they_were_written() {
    let scratch = Scratch::new();
    let path = scratch.path().join("x.npy");
    let mut header = "{'descr': '<f8', 'fortran_order': False, 'shape': (3000, 4), }".to_string();
    header.push_str(&" ".repeat(117 - header.len()));
    // A minute, what is the same everywhere, what f32 holds, and a minute that it holds.
    let row = |row: u32| {
        [
            if row == 7 {
                0.0
            } else {
                1.7e9 + f64::from(row) / 50.0
            },
            1.7e9 + 0.5,
            f64::from(row),
            f64::from(row) / 50.0,
        ]
    };
    let numbers: Vec<u8> = (0..3000).flat_map(row).flat_map(f64::to_le_bytes).collect();
    fs::write(
        &path,
        [
            b"\x93NUMPY\x01\x00v\x00",
            header.as_bytes(),
            b"\n",
            &numbers,
        ]
        .concat(),
    )
    .unwrap();
    let features = Rows::new(files::open(&path, None).unwrap().arrays).unwrap();
    let close = columns_too_close(&features).unwrap();
    assert_eq!(
        close.iter().map(|(column, _)| *column).collect::<Vec<_>>(),
        [0]
    );
    assert!(
        close[0].1.least == 1.7e9 && close[0].1.greatest > 1.7e9 + 59.0,
        "{close:?}"
    );
}

//! The format of `docs/adding-a-format.md`: `.fvecs`, vectors for nearest-neighbour search. Each
//! row is its width as an i32, then as many f32, all little-endian.

use std::io::{BufReader, Read};
use std::path::Path;

use ddp_kernels::files::testing::Scratch;

use crate::error::Result;
use crate::files::array::NumberType;
use crate::files::format::{Contents, DataFile, Format, Holds, PLAIN};
use crate::files::io::MappedReader;
use crate::files::tests::{file, refused};
use crate::files::{cache, flat, format, open as open_file};

pub(crate) static FVECS: Format = Format {
    name: "an .fvecs file",
    endings: &[".fvecs"],
    holds: Holds::Arrays(open),
    ..PLAIN
};

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let made = cache::converted(file.path, file.cache_dir, "fvecs, numbers alone", |made| {
        flat::write(made, |out| write(file, out))
    })?;
    flat::open(&made, file.name)
}

/// Writes the numbers without the widths between them.
fn write(file: &DataFile<'_>, out: &mut flat::Writer) -> Result<flat::About> {
    let mapped = file.map()?;
    let mut reader = BufReader::new(MappedReader::new(&mapped, 0..mapped.len()));
    let (mut width, mut at, mut row) = ([0; 4], 0, Vec::new());
    while at < mapped.len() {
        let cut = |_| {
            file.bad(format!(
                "the row at byte {at} is cut short; help: copy it again"
            ))
        };
        reader.read_exact(&mut width).map_err(cut)?;
        let numbers = u32::from_le_bytes(width) as usize;
        if row.is_empty() {
            row = vec![0; 4 * numbers.clamp(1, mapped.len() as usize / 4)];
            out.begin("", NumberType::F32, &[row.len() / 4])?;
        }
        if row.len() != 4 * numbers {
            return Err(file.bad(format!(
                "the row at byte {at}: expected {} numbers, as in the first, got {numbers}; help: it is damaged, or of \
                 another format",
                row.len() / 4
            )));
        }
        reader.read_exact(&mut row).map_err(cut)?;
        out.write(&row)?;
        at += 4 + row.len() as u64;
    }
    Ok(flat::About {
        source: Some(file.name.into()),
        ..flat::About::default()
    })
}

fn vectors(rows: &[&[f32]]) -> Vec<u8> {
    let row = |row: &&[f32]| {
        let numbers = row.iter().flat_map(|number| number.to_le_bytes());
        let width = (row.len() as u32).to_le_bytes().into_iter();
        width.chain(numbers).collect::<Vec<u8>>()
    };
    rows.iter().flat_map(row).collect()
}

#[test]
fn a_format_of_one_file_and_one_line_is_read_like_any_other() {
    let scratch = Scratch::new();
    let path = file(&scratch, "a.fvecs", &vectors(&[&[1.0, 2.0], &[3.0, 4.0]]));
    assert!(format(&path).unwrap().is(&FVECS));
    let contents = open_file(&path, None).unwrap();
    let (array, mut x) = (&contents.arrays[0], [0.0; 4]);
    assert_eq!((array.rows(), array.row_shape()), (2, &[2][..]));
    array.read_f32(0, &mut x).unwrap();
    assert_eq!(x, [1.0, 2.0, 3.0, 4.0]);
    // The second time its copy is read.
    let again = open_file(&path, None).unwrap();
    assert!(again.arrays[0].is_same(array));
}

#[test]
fn what_is_wrong_with_it_is_named() {
    let scratch = Scratch::new();
    let whole = vectors(&[&[1.0, 2.0], &[3.0, 4.0, 5.0]]);
    for (bytes, why) in [
        (
            &whole[..],
            "the row at byte 12: expected 2 numbers, as in the first, got 3",
        ),
        (&whole[..10], "the row at byte 0 is cut short"),
        (
            &[0; 4],
            "the row at byte 0: expected 1 numbers, as in the first, got 0",
        ),
    ] {
        let text = refused(&file(&scratch, "a.fvecs", bytes));
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn rows_of_it_are_trained_on() {
    let scratch = Scratch::new();
    let x = file(&scratch, "a.fvecs", &vectors(&[&[1.0, 2.0], &[3.0, 4.0]]));
    let labels = [0i64, 1].map(i64::to_le_bytes);
    let y = [super::made::npy("<i8", false, "(2,)", 0), labels.concat()].concat();
    let y = file(&scratch, "y.npy", &y);
    let spec = x.to_str().unwrap().parse().unwrap();
    let mut request = crate::DataRequest::new(spec);
    request.labels = Some(y.display().to_string());
    let data = crate::prepare(&request, None, &crate::Alone).unwrap();
    let [x, _] = crate::read_rows(&*data.train, &[1]).unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [3.0, 4.0]);
    assert!(Path::new(FVECS.endings[0]).extension().is_none());
}

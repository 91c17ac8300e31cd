//! Files of data with exactly the bytes that other programs write.

use std::io::Write;

use safetensors::{Dtype, tensor::TensorView};

/// Rows that every kind of file can hold: features are whole numbers from 0 to 255.
pub(crate) const ROWS: usize = 60;
/// Numbers of a row.
pub(crate) const FEATURES: usize = 6;
/// The classes of the rows.
pub(crate) const CLASSES: [&str; 3] = ["cat", "dog", "fish"];

/// The features of a row and its class: rows of a class are near each other.
pub(crate) fn row(index: usize) -> ([u8; FEATURES], usize) {
    let class = index % CLASSES.len();
    let pixel = |feature: usize| {
        let near = if feature % CLASSES.len() == class {
            180
        } else {
            40
        };
        near + ((index * 37 + feature * 101) % 71) as u8
    };
    (std::array::from_fn(pixel), class)
}

/// The features of these rows, each number as `as_bytes` writes it.
pub(crate) fn features<const N: usize>(
    rows: std::ops::Range<usize>,
    as_bytes: fn(u8) -> [u8; N],
) -> Vec<u8> {
    rows.flat_map(|index| row(index).0)
        .flat_map(as_bytes)
        .collect()
}

/// The classes of these rows, each as `as_bytes` writes it.
pub(crate) fn classes<const N: usize>(
    rows: std::ops::Range<usize>,
    as_bytes: fn(u8) -> [u8; N],
) -> Vec<u8> {
    rows.flat_map(|index| as_bytes(row(index).1 as u8))
        .collect()
}

/// A number as f32, little-endian, as numpy has it on most machines.
pub(crate) fn f32_le(number: u8) -> [u8; 4] {
    f32::from(number).to_le_bytes()
}

/// As i64, little-endian.
pub(crate) fn i64_le(number: u8) -> [u8; 8] {
    i64::from(number).to_le_bytes()
}

/// A `.npy` file.
pub(crate) fn npy(descr: &str, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let mut bytes = npy_header(descr, shape);
    bytes.extend(data);
    bytes
}

/// What stands before the data of a `.npy` file.
pub(crate) fn npy_header(descr: &str, shape: &[usize]) -> Vec<u8> {
    let shape: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let mut header = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}",
        shape.trim_end()
    );
    // A multiple of 64 with the ten bytes before it and the line's end.
    header.push_str(&" ".repeat((64 - (10 + header.len() + 1) % 64) % 64));
    header.push('\n');
    let length = u16::try_from(header.len())
        .expect("it is short")
        .to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes()].concat()
}

/// A `.npz` file with these members.
pub(crate) fn npz(members: &[(&str, Vec<u8>)], is_packed: bool) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let method = if is_packed {
        zip::CompressionMethod::Deflated
    } else {
        zip::CompressionMethod::Stored
    };
    for (name, bytes) in members {
        let options = zip::write::SimpleFileOptions::default().compression_method(method);
        zip.start_file(format!("{name}.npy"), options)
            .expect("memory takes it");
        zip.write_all(bytes).expect("memory takes it");
    }
    zip.finish().expect("memory takes it").into_inner()
}

/// An IDX file of bytes.
pub(crate) fn idx(shape: &[usize], data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    shape
        .iter()
        .for_each(|&size| bytes.extend((size as u32).to_be_bytes()));
    bytes.extend(data);
    bytes
}

/// `bytes`, packed.
pub(crate) fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(bytes).expect("memory takes it");
    gz.finish().expect("memory takes it")
}

/// A `.safetensors` file with features and labels of these rows.
pub(crate) fn tensors(rows: std::ops::Range<usize>) -> Vec<u8> {
    let (x, y) = (
        features(rows.clone(), f32_le),
        classes(rows.clone(), i64_le),
    );
    let x = TensorView::new(Dtype::F32, vec![rows.len(), FEATURES], &x)
        .expect("it is as long as it should be");
    let y =
        TensorView::new(Dtype::I64, vec![rows.len()], &y).expect("it is as long as it should be");
    safetensors::serialize([("features", x), ("labels", y)], None).expect("they have names")
}

/// A table with a header; the label as `label` writes it.
pub(crate) fn csv(rows: std::ops::Range<usize>, label: fn(usize) -> String) -> Vec<u8> {
    let mut text = (0..FEATURES)
        .map(|feature| format!("f{feature},"))
        .collect::<String>()
        + "kind\n";
    for index in rows {
        let (features, class) = row(index);
        text.extend(features.map(|feature| format!("{feature},")));
        text.push_str(&label(class));
        text.push('\n');
    }
    text.into_bytes()
}

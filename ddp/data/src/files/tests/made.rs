//! Files with arbitrary headers, also false ones. Also part of `ddp/tests/lying_files.rs`.

/// An `.npy` file that claims this dtype, order and shape, and has `bytes` zeros.
pub(crate) fn npy(descr: &str, is_fortran: bool, shape: &str, bytes: usize) -> Vec<u8> {
    let order = if is_fortran { "True" } else { "False" };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    text.push_str(&" ".repeat(117 - text.len()));
    [
        b"\x93NUMPY\x01\x00v\x00",
        text.as_bytes(),
        b"\n",
        &vec![0; bytes],
    ]
    .concat()
}

/// A `.safetensors` file with this header and `bytes` zeros.
pub(crate) fn safetensors(header: &str, bytes: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), &vec![0; bytes]].concat()
}

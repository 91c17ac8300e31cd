//! The entry points of error codes.

use std::ffi::c_char;

use super::entry;
use crate::error::CUresult;
use crate::machine::{self, Out, put};

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: u32, name: Out<'_, *const c_char>) -> CUresult {
    machine::call("cuGetErrorName", |_| {
        let found = entry(error);
        put(
            name,
            found.map_or(std::ptr::null(), |(_, name, _)| name.as_ptr()),
        )?;
        found.map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: u32, text: Out<'_, *const c_char>) -> CUresult {
    machine::call("cuGetErrorString", |_| {
        let found = entry(error);
        put(
            text,
            found.map_or(std::ptr::null(), |(.., text)| text.as_ptr()),
        )?;
        found.map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    })
}

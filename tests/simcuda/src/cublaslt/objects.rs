//! Handles and descriptors: the table of live objects, and the entry points that create, change and
//! destroy them.
//!
//! Handles are table numbers, not pointers, so that stale and foreign handles are recognised.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::sys::cublasStatus_t as Status;

use super::attributes::{Attributes, Layout, Operation, Preference};
use super::entry::{Refused, call, invalid, put};
use super::matrix::Refusal;
use super::problem::Problem;
use crate::machine::Out;

/// The object of a handle.
#[derive(Clone, Debug)]
pub(super) enum Object {
    /// Of a device.
    Library(usize),
    Operation(Operation),
    Layout(Layout),
    Preference(Preference),
}

/// All live handles. Numbers are not reused; they are multiples of 16 that no allocator returns.
#[derive(Debug)]
struct Objects {
    next: usize,
    live: BTreeMap<usize, Object>,
}

static OBJECTS: Mutex<Objects> = Mutex::new(Objects {
    next: 0x10,
    live: BTreeMap::new(),
});

fn objects() -> MutexGuard<'static, Objects> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn create(out: Out<'_, usize>, object: Object) -> Result<(), Refused> {
    let mut objects = objects();
    put(out, objects.next)?;
    let handle = objects.next;
    objects.next += 0x10;
    objects.live.insert(handle, object);
    Ok(())
}

pub(super) fn destroy(handle: usize, is_kind: impl Fn(&Object) -> bool) -> Result<(), Refused> {
    let mut objects = objects();
    match objects.live.get(&handle) {
        Some(object) if is_kind(object) => {
            objects.live.remove(&handle);
            Ok(())
        }
        _ => Err(invalid(format!(
            "{handle:#x} is not such a handle, or was destroyed already"
        ))),
    }
}

macro_rules! getter {
    ($name:ident, $variant:ident, $kind:ty) => {
        pub(super) fn $name(handle: usize) -> Result<$kind, Refused> {
            match objects().live.get(&handle) {
                Some(Object::$variant(object)) => Ok(object.clone()),
                other => Err(invalid(format!(
                    "{handle:#x} is no {} but {other:?}",
                    stringify!($variant)
                ))),
            }
        }
    };
}
getter!(library, Library, usize);
getter!(operation, Operation, Operation);
getter!(layout, Layout, Layout);
getter!(preference, Preference, Preference);

/// Creates an operation's descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescCreate(
    handle: Out<'_, usize>,
    compute: u32,
    scale: u32,
) -> Status {
    call("cublasLtMatmulDescCreate", |_| {
        create(handle, Object::Operation(Operation::new(compute, scale)))
    })
}

/// Destroys an operation's descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescDestroy(handle: usize) -> Status {
    call("cublasLtMatmulDescDestroy", |_| {
        destroy(handle, |object| matches!(object, Object::Operation(_)))
    })
}

/// Creates a matrix's descriptor: columns are contiguous, `ld` elements apart.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutCreate(
    handle: Out<'_, usize>,
    kind: u32,
    rows: u64,
    columns: u64,
    ld: i64,
) -> Status {
    call("cublasLtMatrixLayoutCreate", |_| {
        create(handle, Object::Layout(Layout::new(kind, rows, columns, ld)))
    })
}

/// Destroys a matrix's descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutDestroy(handle: usize) -> Status {
    call("cublasLtMatrixLayoutDestroy", |_| {
        destroy(handle, |object| matches!(object, Object::Layout(_)))
    })
}

/// Creates the preferences of a search.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceCreate(handle: Out<'_, usize>) -> Status {
    call("cublasLtMatmulPreferenceCreate", |_| {
        create(handle, Object::Preference(Preference::default()))
    })
}

/// Destroys the preferences of a search.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceDestroy(handle: usize) -> Status {
    call("cublasLtMatmulPreferenceDestroy", |_| {
        destroy(handle, |object| matches!(object, Object::Preference(_)))
    })
}

/// Runs `body` on the attributes of a live object.
fn with_attributes(
    handle: usize,
    body: impl FnOnce(&mut dyn Attributes) -> Result<(), Refused>,
) -> Result<(), Refused> {
    match objects().live.get_mut(&handle) {
        Some(Object::Operation(object)) => body(object),
        Some(Object::Layout(object)) => body(object),
        Some(Object::Preference(object)) => body(object),
        _ => Err(invalid(format!(
            "{handle:#x} is not a descriptor, or was destroyed"
        ))),
    }
}

/// # Safety
/// `from` is null or holds `bytes` bytes.
unsafe fn set_attribute(
    name: &'static str,
    handle: usize,
    attribute: u32,
    from: *const c_void,
    bytes: usize,
) -> Status {
    call(name, |_| {
        with_attributes(handle, |object| {
            let mut field = object
                .field(attribute)
                .ok_or_else(|| not_modelled(attribute))?;
            if from.is_null() || bytes != field.bytes() {
                return Err(invalid(format!(
                    "attribute {attribute} has {} bytes, got {bytes}",
                    field.bytes()
                )));
            }
            // SAFETY: the caller vouches for `bytes` bytes there, and bytes need no alignment.
            field.set(unsafe { std::slice::from_raw_parts(from.cast(), bytes) });
            Ok(())
        })
    })
}

/// # Safety
/// `to` is null or has room for `bytes` bytes.
unsafe fn get_attribute(
    name: &'static str,
    handle: usize,
    attribute: u32,
    to: *mut c_void,
    bytes: usize,
    written: Out<'_, usize>,
) -> Status {
    call(name, |_| {
        with_attributes(handle, |object| {
            let value = object
                .field(attribute)
                .ok_or_else(|| not_modelled(attribute))?
                .get();
            // Documented: without room, only the size is returned.
            if bytes == 0 {
                return put(written, value.len());
            }
            if to.is_null() || bytes < value.len() {
                return Err(invalid(format!(
                    "attribute {attribute} has {} bytes, room for {bytes}",
                    value.len()
                )));
            }
            // SAFETY: the caller vouches for room for `bytes` bytes, and the value has no more.
            unsafe {
                to.cast::<u8>()
                    .copy_from_nonoverlapping(value.as_ptr(), value.len())
            };
            if let Some(written) = written {
                written.write(value.len());
            }
            Ok(())
        })
    })
}

fn not_modelled(attribute: u32) -> Refused {
    Refusal::Unsupported(format!("attribute {attribute} is not modelled")).into()
}

/// Sets an attribute of an operation.
///
/// # Safety
/// `from` is null or holds `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    handle: usize,
    attribute: u32,
    from: *const c_void,
    bytes: usize,
) -> Status {
    // SAFETY: this function's contract is that one's.
    unsafe {
        set_attribute(
            "cublasLtMatmulDescSetAttribute",
            handle,
            attribute,
            from,
            bytes,
        )
    }
}

/// Reads an attribute of an operation.
///
/// # Safety
/// `to` is null or has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescGetAttribute(
    handle: usize,
    attribute: u32,
    to: *mut c_void,
    bytes: usize,
    written: Out<'_, usize>,
) -> Status {
    // SAFETY: this function's contract is that one's.
    unsafe {
        get_attribute(
            "cublasLtMatmulDescGetAttribute",
            handle,
            attribute,
            to,
            bytes,
            written,
        )
    }
}

/// Sets an attribute of a matrix.
///
/// # Safety
/// `from` is null or holds `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(
    handle: usize,
    attribute: u32,
    from: *const c_void,
    bytes: usize,
) -> Status {
    // SAFETY: this function's contract is that one's.
    unsafe {
        set_attribute(
            "cublasLtMatrixLayoutSetAttribute",
            handle,
            attribute,
            from,
            bytes,
        )
    }
}

/// Reads an attribute of a matrix.
///
/// # Safety
/// `to` is null or has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutGetAttribute(
    handle: usize,
    attribute: u32,
    to: *mut c_void,
    bytes: usize,
    written: Out<'_, usize>,
) -> Status {
    // SAFETY: this function's contract is that one's.
    unsafe {
        get_attribute(
            "cublasLtMatrixLayoutGetAttribute",
            handle,
            attribute,
            to,
            bytes,
            written,
        )
    }
}

/// Sets an attribute of a search.
///
/// # Safety
/// `from` is null or holds `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    handle: usize,
    attribute: u32,
    from: *const c_void,
    bytes: usize,
) -> Status {
    // SAFETY: this function's contract is that one's.
    unsafe {
        set_attribute(
            "cublasLtMatmulPreferenceSetAttribute",
            handle,
            attribute,
            from,
            bytes,
        )
    }
}

/// Reads an attribute of a search.
///
/// # Safety
/// `to` is null or has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceGetAttribute(
    handle: usize,
    attribute: u32,
    to: *mut c_void,
    bytes: usize,
    written: Out<'_, usize>,
) -> Status {
    // SAFETY: this function's contract is that one's.
    unsafe {
        get_attribute(
            "cublasLtMatmulPreferenceGetAttribute",
            handle,
            attribute,
            to,
            bytes,
            written,
        )
    }
}

/// The matmul that descriptors describe, checked.
pub(super) fn problem(operation_handle: usize, layouts: [usize; 4]) -> Result<Problem, Refused> {
    let operation = operation(operation_handle)?;
    let [a, b, c, d] = layouts.map(layout);
    Ok(Problem::new(&operation, [&a?, &b?, &c?, &d?])?)
}

//! NVRTC: a separate process compiles the product's kernels to PTX with NVIDIA's NVRTC. A CUBIN is
//! that PTX in an envelope, which `kernel` loads.

mod compiler;
mod options;
mod program;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::nvrtc::sys::nvrtcResult as Status;

pub(crate) use self::compiler::Compiled;
use self::compiler::Failed;
use self::options::Options;
pub(crate) use self::program::Program;
use crate::error::CUresult;
use crate::machine::{self, LockedMachine, Out};

/// What a CUBIN begins with; the length of its PTX follows in 8 bytes, then the PTX.
pub(crate) const CUBIN_HEADER: &[u8; 8] = b"SIMCUBIN";

#[derive(Clone, Debug)]
struct Outcome {
    compiled: Compiled,
    is_virtual: bool,
    lowered: BTreeMap<String, std::ffi::CString>,
}

#[derive(Debug, Default)]
struct Entry {
    program: Program,
    log: String,
    outcome: Option<Outcome>,
    was_compiled: bool,
}

/// All programs by handle. Handles are numbers that no allocator returns, and unique.
#[derive(Debug)]
struct Programs {
    next: usize,
    live: BTreeMap<usize, Entry>,
}

static PROGRAMS: Mutex<Programs> = Mutex::new(Programs {
    next: 0x10,
    live: BTreeMap::new(),
});

fn programs() -> MutexGuard<'static, Programs> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles a program without a handle. The error is the log.
#[cfg(test)]
pub(crate) fn compile_now(program: &Program, options: &[&str]) -> Result<Compiled, String> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    compiler::compile(program, &Options::new(&options)).map_err(|failed| match failed {
        Failed::Program(_, log) | Failed::Machine(log) => log,
    })
}

fn call(name: &'static str, body: impl FnOnce(&mut LockedMachine) -> Result<(), Status>) -> Status {
    let of_driver = |code| match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Status::NVRTC_ERROR_OUT_OF_MEMORY,
        _ => Status::NVRTC_ERROR_INTERNAL_ERROR,
    };
    machine::call_library(name, of_driver, body)
        .err()
        .unwrap_or(Status::NVRTC_SUCCESS)
}

fn put<T>(out: Out<'_, T>, value: T) -> Result<(), Status> {
    out.ok_or(Status::NVRTC_ERROR_INVALID_INPUT)?.write(value);
    Ok(())
}

/// What a handle stands for.
fn with<R>(handle: usize, body: impl FnOnce(&mut Entry) -> Result<R, Status>) -> Result<R, Status> {
    body(
        programs()
            .live
            .get_mut(&handle)
            .ok_or(Status::NVRTC_ERROR_INVALID_PROGRAM)?,
    )
}

fn with_outcome<R>(
    handle: usize,
    body: impl FnOnce(&Outcome) -> Result<R, Status>,
) -> Result<R, Status> {
    with(handle, |entry| {
        body(
            entry
                .outcome
                .as_ref()
                .ok_or(Status::NVRTC_ERROR_INVALID_PROGRAM)?,
        )
    })
}

/// The text at `pointer`.
///
/// # Safety
/// `pointer` is null or a text that ends with a zero.
unsafe fn text(pointer: *const c_char) -> Result<String, Status> {
    if pointer.is_null() {
        return Err(Status::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: not null, and the caller vouches for the rest.
    Ok(unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned())
}

/// The texts of an array of `count`.
///
/// # Safety
/// `array` is null or has `count` texts.
unsafe fn texts(array: *const *const c_char, count: c_int) -> Result<Vec<String>, Status> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let count = usize::try_from(count).map_err(|_| Status::NVRTC_ERROR_INVALID_INPUT)?;
    if array.is_null() {
        return Err(Status::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: `array` has `count` pointers, each of which is as `text` asks.
    (0..count)
        .map(|index| unsafe { text(*array.add(index)) })
        .collect()
}

/// Copies bytes to the caller's buffer.
///
/// # Safety
/// `to` is null or has room for `bytes`, whose size the caller got from the size function.
unsafe fn give(to: *mut c_char, bytes: &[u8]) -> Result<(), Status> {
    if to.is_null() {
        return Err(Status::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: the caller's room; nothing of ours lies there.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), bytes.len()) };
    Ok(())
}

impl Compiled {
    /// The PTX as a text that ends with a zero.
    fn text(&self) -> Vec<u8> {
        [self.ptx.trim_end_matches('\0').as_bytes(), b"\0"].concat()
    }

    /// The PTX in an envelope.
    pub(crate) fn cubin(&self) -> Vec<u8> {
        let bytes = (self.ptx.len() as u64).to_le_bytes();
        [CUBIN_HEADER, &bytes[..], self.ptx.as_bytes()].concat()
    }
}

fn told(failed: Failed) -> (Status, String) {
    match failed {
        // The same numbers as in the interface.
        Failed::Program(code, log) => {
            let invalid = code == Status::NVRTC_ERROR_INVALID_OPTION as i32;
            let status = if invalid {
                Status::NVRTC_ERROR_INVALID_OPTION
            } else {
                Status::NVRTC_ERROR_COMPILATION
            };
            (status, log)
        }
        Failed::Machine(log) => {
            eprint!("{log}");
            (Status::NVRTC_ERROR_INTERNAL_ERROR, log)
        }
    }
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcVersion(major: Out<'_, c_int>, minor: Out<'_, c_int>) -> Status {
    call("nvrtcVersion", |held| {
        let (of_major, of_minor) = held
            .without(compiler::version)
            .map_err(|failed| told(failed).0)?;
        put(major, of_major)?;
        put(minor, of_minor)
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(status: c_int) -> *const c_char {
    const TEXTS: [&CStr; 13] = [
        c"NVRTC_SUCCESS",
        c"NVRTC_ERROR_OUT_OF_MEMORY",
        c"NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        c"NVRTC_ERROR_INVALID_INPUT",
        c"NVRTC_ERROR_INVALID_PROGRAM",
        c"NVRTC_ERROR_INVALID_OPTION",
        c"NVRTC_ERROR_COMPILATION",
        c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        c"NVRTC_ERROR_INTERNAL_ERROR",
        c"NVRTC_ERROR_TIME_FILE_WRITE_FAILED",
    ];
    usize::try_from(status)
        .ok()
        .and_then(|index| TEXTS.get(index))
        .unwrap_or(&c"NVRTC_ERROR unknown")
        .as_ptr()
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetNumSupportedArchs(count: Out<'_, c_int>) -> Status {
    call("nvrtcGetNumSupportedArchs", |_| {
        put(count, options::ARCHITECTURES.len() as c_int)
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetSupportedArchs(architectures: *mut c_int) -> Status {
    call("nvrtcGetSupportedArchs", |_| {
        let known: Vec<u8> = options::ARCHITECTURES
            .iter()
            .flat_map(|number| number.to_ne_bytes())
            .collect();
        // SAFETY: the caller has room for as many as nvrtcGetNumSupportedArchs says.
        unsafe { give(architectures.cast(), &known) }
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: Out<'_, usize>,
    source: *const c_char,
    name: *const c_char,
    header_count: c_int,
    headers: *const *const c_char,
    include_names: *const *const c_char,
) -> Status {
    call("nvrtcCreateProgram", |_| {
        // SAFETY: the documentation asks for texts and arrays of `header_count` texts.
        let (source, texts, names) = unsafe {
            (
                text(source)?,
                texts(headers, header_count)?,
                texts(include_names, header_count)?,
            )
        };
        let name = if name.is_null() {
            "default_program".to_owned()
        } else {
            // SAFETY: not null, so the documentation asks for a C string.
            unsafe { text(name)? }
        };
        let headers = names.into_iter().zip(texts).collect();
        let mut programs = programs();
        let handle = programs.next;
        put(program, handle)?;
        programs.next += 0x10;
        let program = Program {
            name,
            source,
            headers,
            expressions: Vec::new(),
        };
        programs.live.insert(
            handle,
            Entry {
                program,
                ..Entry::default()
            },
        );
        Ok(())
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut usize) -> Status {
    call("nvrtcDestroyProgram", |_| {
        // SAFETY: null or the place of a handle, as the documentation asks.
        let handle = unsafe { program.as_mut() }.ok_or(Status::NVRTC_ERROR_INVALID_PROGRAM)?;
        programs()
            .live
            .remove(handle)
            .ok_or(Status::NVRTC_ERROR_INVALID_PROGRAM)?;
        *handle = 0;
        Ok(())
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcAddNameExpression(
    program: usize,
    expression: *const c_char,
) -> Status {
    call("nvrtcAddNameExpression", |_| {
        // SAFETY: the documentation asks for a text.
        let expression = unsafe { text(expression)? };
        with(program, |entry| {
            if entry.was_compiled {
                return Err(Status::NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION);
            }
            entry.program.expressions.push(expression);
            Ok(())
        })
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetLoweredName(
    program: usize,
    expression: *const c_char,
    name: Out<'_, *const c_char>,
) -> Status {
    call("nvrtcGetLoweredName", |_| {
        // SAFETY: the documentation asks for a text.
        let expression = unsafe { text(expression)? };
        with(program, |entry| {
            let outcome = entry
                .outcome
                .as_ref()
                .ok_or(Status::NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION)?;
            // The pointer stays valid until the program is destroyed: no program compiles twice.
            put(
                name,
                outcome
                    .lowered
                    .get(&expression)
                    .ok_or(Status::NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID)?
                    .as_ptr(),
            )
        })
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: usize,
    option_count: c_int,
    given: *const *const c_char,
) -> Status {
    call("nvrtcCompileProgram", |held| {
        // SAFETY: the documentation asks for an array of `option_count` texts.
        let given = unsafe { texts(given, option_count)? };
        let source = with(program, |entry| {
            entry.was_compiled = true;
            entry.outcome = None;
            Ok(entry.program.clone())
        })?;
        // It takes long, and other threads need the machine meanwhile.
        let (status, log, outcome) = held.without(|| compile(&source, &given));
        with(program, |entry| {
            (entry.log, entry.outcome) = (log, outcome);
            Ok(())
        })?;
        if status == Status::NVRTC_SUCCESS {
            Ok(())
        } else {
            Err(status)
        }
    })
}

fn compile(program: &Program, given: &[String]) -> (Status, String, Option<Outcome>) {
    let options = Options::new(given);
    let compiled = match compiler::compile(program, &options) {
        Ok(compiled) => compiled,
        Err(failed) => {
            let (status, log) = told(failed);
            return (status, log, None);
        }
    };
    let named = |(expression, name): (&String, &String)| {
        Some((
            expression.clone(),
            std::ffi::CString::new(name.as_str()).ok()?,
        ))
    };
    let outcome = Outcome {
        lowered: compiled.lowered.iter().filter_map(named).collect(),
        is_virtual: options.is_virtual,
        compiled,
    };
    (Status::NVRTC_SUCCESS, String::new(), Some(outcome))
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetProgramLogSize(program: usize, size: Out<'_, usize>) -> Status {
    call("nvrtcGetProgramLogSize", |_| {
        with(program, |entry| put(size, entry.log.len() + 1))
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: usize, log: *mut c_char) -> Status {
    call("nvrtcGetProgramLog", |_| {
        with(program, |entry| {
            // A zero inside would end the text early; NVRTC writes none.
            let text = [entry.log.as_bytes(), b"\0"].concat();
            // SAFETY: the caller has room for what nvrtcGetProgramLogSize says.
            unsafe { give(log, &text) }
        })
    })
}

/// See NVRTC's documentation. A virtual architecture has no CUBIN: its size is 0.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetCUBINSize(program: usize, size: Out<'_, usize>) -> Status {
    call("nvrtcGetCUBINSize", |_| {
        with_outcome(program, |outcome| {
            put(
                size,
                if outcome.is_virtual {
                    0
                } else {
                    outcome.compiled.cubin().len()
                },
            )
        })
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: usize, cubin: *mut c_char) -> Status {
    call("nvrtcGetCUBIN", |_| {
        with_outcome(program, |outcome| {
            if outcome.is_virtual {
                return Err(Status::NVRTC_ERROR_INVALID_PROGRAM);
            }
            // SAFETY: the caller has room for what nvrtcGetCUBINSize says.
            unsafe { give(cubin, &outcome.compiled.cubin()) }
        })
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetPTXSize(program: usize, size: Out<'_, usize>) -> Status {
    call("nvrtcGetPTXSize", |_| {
        with_outcome(program, |outcome| put(size, outcome.compiled.text().len()))
    })
}

/// See NVRTC's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTX(program: usize, text: *mut c_char) -> Status {
    call("nvrtcGetPTX", |_| {
        with_outcome(program, |outcome| {
            // SAFETY: the caller has room for what nvrtcGetPTXSize says.
            unsafe { give(text, &outcome.compiled.text()) }
        })
    })
}

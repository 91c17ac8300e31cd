//! A loaded library and tables of its functions.
//!
//! All functions are looked up before the first call, so a library that lacks one is an error and
//! never a panic. cudarc's own loading knows neither wheels nor versioned files, and panics.

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::message::Help;

/// A loaded library. It stays loaded once its functions were found.
#[derive(Debug)]
pub struct Library {
    handle: libloading::Library,
    what: &'static str,
    missing: Vec<String>,
}

impl Library {
    /// `handle` under the name that errors use.
    pub(crate) fn new(handle: libloading::Library, what: &'static str) -> Library {
        Library {
            handle,
            what,
            missing: Vec::new(),
        }
    }

    /// The address of a function; `complete` refuses a library that lacks it.
    #[doc(hidden)]
    pub fn function(&mut self, name: &CStr) -> *const c_void {
        // SAFETY: the symbol is only looked up as an address; the caller gives it its type.
        let found = unsafe { self.handle.get::<*const c_void>(name) }.map(|symbol| *symbol);
        match found {
            Ok(address) if !address.is_null() => address,
            _ => {
                self.missing.push(name.to_string_lossy().into_owned());
                std::ptr::null()
            }
        }
    }

    /// Keeps the library loaded if it had every function that was looked up.
    #[doc(hidden)]
    pub fn complete(self, help: &str) -> Result<(), String> {
        if !self.missing.is_empty() {
            let missing = self.missing.join(", ");
            return Err(format!("{} lacks {missing}{}", self.what, Help(help)));
        }
        // Its function pointers were handed out: it must not be unloaded.
        std::mem::forget(self.handle);
        Ok(())
    }
}

/// The loader's own message, which names the file.
pub(crate) fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that a function's code came from.
pub(crate) fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and writes only to `info`, a whole Dl_info.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr filled `info`, and zeros are a valid Dl_info in any case: only pointers.
    let name = unsafe { info.assume_init() }.dli_fname;
    if name.is_null() {
        return None;
    }
    // SAFETY: `dli_fname` is the loader's C string, alive while the library is loaded.
    let name = unsafe { CStr::from_ptr(name) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Declares a table of a library's functions, and `load(library, help)`, which fills it or names
/// the functions that the library lacks:
///
/// ```text
/// functions! {
///     /// NVRTC's functions that are called here.
///     pub(crate) struct Functions { fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int; }
/// }
/// ```
///
/// Without a visibility the table is `pub(super)`. The signatures must be those of the library's
/// header; the author of the table answers for that.
#[macro_export]
#[doc(hidden)]
macro_rules! foreign_functions {
    ($(#[$doc:meta])* struct $($rest:tt)*) => {
        $crate::foreign_functions! { $(#[$doc])* pub(super) struct $($rest)* }
    };
    ($(#[$doc:meta])* $seen:vis struct $Table:ident {
        $(fn $name:ident($($argument:ty),* $(,)?) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        $seen struct $Table {
            $($seen $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $Table {
            #[allow(non_snake_case)]
            $seen fn load(
                mut library: $crate::library::Library,
                help: &str,
            ) -> ::std::result::Result<$Table, String> {
                $(let $name = library.function(const {
                    let name = concat!(stringify!($name), "\0");
                    match std::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a function's name has no zero byte"),
                    }
                });)*
                library.complete(help)?;
                Ok($Table {
                    // SAFETY: not null, because the library is complete; the table repeats the
                    // signature of NVIDIA's header, which has never changed.
                    $($name: unsafe {
                        std::mem::transmute::<
                            *const std::ffi::c_void,
                            unsafe extern "C" fn($($argument),*) -> $result,
                        >($name)
                    },)*
                })
            }
        }
    };
}
pub use foreign_functions as functions;

//! A library of CUDA's, loaded at first use from where discovery found its file. Its functions are looked up by name,
//! all of them before the first is called, so that a library that lacks one is an error and never a panic. (cudarc's own
//! loading goes by names alone, knows neither wheels nor versioned files, and panics.) `foreign.rs` lends this to other crates.

use std::ffi::{CStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::device::Library as Part;

/// A library that is loaded, for the rest of the process once its functions were found.
#[derive(Debug)]
pub struct Library {
    handle: libloading::Library,
    what: &'static str,
    missing: Vec<String>,
}

impl Library {
    /// NCCL, as discovery found it.
    pub fn nccl() -> Result<Library, String> {
        Library::open(&crate::device::discover().nccl, &["libnccl.so.2", "libnccl.so"])
    }

    /// Loads the file that discovery found; where it found none, what the loader finds under one of `names`. For this crate alone: a `Part` says
    /// any path that its maker likes, and loading a file runs its code.
    pub(crate) fn open(part: &Part, names: &[&str]) -> Result<Library, String> {
        let what = part.what;
        let found = part.found.as_deref().filter(|_| part.is_sound());
        let mut refusal = None;
        for name in found.into_iter().chain(names.iter().map(Path::new)) {
            // SAFETY: loading runs the library's initialisers. It is NVIDIA's, or stands in for it, from where the user
            // installed it or told this process to look; every CUDA program loads it in this way.
            match unsafe { libloading::Library::new(name) } {
                Ok(handle) => return Ok(Library { handle, what, missing: Vec::new() }),
                Err(error) if Some(name) == found => {
                    // What the loader itself says, with the file's name.
                    let said = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                    refusal = Some(format!("{what} cannot be loaded: {said}"));
                }
                Err(_) => {}
            }
        }
        let advice =
            part.advice.as_deref().unwrap_or("Reinstall it, or put the folder of a sound one in LD_LIBRARY_PATH");
        Err(match (refusal, found) {
            (Some(refusal), _) => format!("{refusal}. {advice}"),
            (None, _) if advice.starts_with("broken") => format!("{what} cannot be used: {advice}"),
            _ => format!("{what} is not found: {advice}"),
        })
    }

    /// The address of a function; a library that lacks it is refused by `complete`.
    #[doc(hidden)]
    pub fn function(&mut self, name: &CStr) -> *const c_void {
        // SAFETY: the symbol is only looked for here, as an address; who calls it says its type.
        let found = unsafe { self.handle.get::<*const c_void>(name) }.map(|symbol| *symbol);
        match found {
            Ok(address) if !address.is_null() => address,
            _ => {
                self.missing.push(name.to_string_lossy().into_owned());
                std::ptr::null()
            }
        }
    }

    /// Keeps the library loaded for good, if it had all that was looked for.
    #[doc(hidden)]
    pub fn complete(self, way_out: &str) -> Result<(), String> {
        if !self.missing.is_empty() {
            return Err(format!("{} lacks {}. {way_out}", self.what, self.missing.join(", ")));
        }
        // Function pointers were taken out of it: it must not be unloaded.
        std::mem::forget(self.handle);
        Ok(())
    }
}

/// The capture that this thread records `queue` in, by number; 0 for none. Here for `foreign.rs`, which is not part of `cuda`.
pub(crate) fn capture_of(queue: &super::queue::Queue) -> u64 {
    super::capture::of(queue)
}

/// The file that a function's code came from.
pub(super) fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and writes only to `info`, a whole Dl_info of ours.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr said that it filled `info`, and zeroes are a valid Dl_info in any case: pointers only.
    let name = unsafe { info.assume_init() }.dli_fname;
    if name.is_null() {
        return None;
    }
    // SAFETY: `dli_fname` is the loader's own C string, alive while the library is loaded, which is for good.
    let name = unsafe { CStr::from_ptr(name) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

/// Declares a table of a library's functions, with `load(library, way_out)` that fills it or says which the library lacks:
///
/// ```text
/// functions! {
///     /// NVRTC's functions that are called here.
///     pub(crate) struct Functions { fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int; }
/// }
/// ```
///
/// Without a visibility the table is for the module above. Its signatures are those of the library's header: who writes them down
/// answers for that.
#[macro_export]
#[doc(hidden)]
macro_rules! foreign_functions {
    ($(#[$doc:meta])* struct $($rest:tt)*) => {
        $crate::foreign_functions! { $(#[$doc])* pub(super) struct $($rest)* }
    };
    ($(#[$doc:meta])* $seen:vis struct $Table:ident { $(fn $name:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        $seen struct $Table {
            $($seen $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $Table {
            #[allow(non_snake_case)]
            $seen fn load(mut library: $crate::foreign::Library, way_out: &str) -> ::std::result::Result<$Table, String> {
                $(let $name = library.function(const {
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a function's name has no zero byte"),
                    }
                });)*
                library.complete(way_out)?;
                Ok($Table {
                    // SAFETY: not null, for the library is complete, and of the signature that the table repeats from
                    // NVIDIA's header, which has been the same since these functions came to be.
                    $($name: unsafe { std::mem::transmute::<*const std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>($name) },)*
                })
            }
        }
    };
}
pub use foreign_functions as functions;

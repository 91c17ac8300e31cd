//! Kernel libraries: loading what `nvrtc` made, and the structures shared with it
//! (`shim/runtime.h`, field for field).

use std::ffi::{CStr, c_char, c_void};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::second::Second;
use super::symbols::{self, Variable};
use crate::error::CUresult;
use crate::nvrtc::{PTX_HEADER, PTX_LENGTH};

/// The version of the structures; the library carries its own.
const ABI_VERSION: u32 = 6;

/// The most threads a block can have.
pub(super) const THREADS_MAX: u32 = 1024;

/// Memory where the accesses of a launch are tracked.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) low: u64,
    pub(super) length_bytes: u64,
    pub(super) marks: *mut u64,
    pub(super) pages: *mut u8,
    pub(super) cells: *mut u64,
    pub(super) read_marks: *mut u64,
}

/// How a launch failed. [`super::message`] lists the kinds; 0 means that it did not fail.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawFailure {
    pub(super) kind: u32,
    pub(super) access: u32,
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) site: u64,
    pub(super) thread: u32,
    pub(super) line: u32,
    pub(super) block: u64,
    pub(super) other_thread: u32,
    pub(super) other_access: u32,
    pub(super) other_block: u64,
    pub(super) other_site: u64,
    pub(super) arrived: u64,
    pub(super) text: *const c_char,
}

impl Default for RawFailure {
    fn default() -> Self {
        // SAFETY: plain numbers and a pointer, for which zeros are valid.
        unsafe { std::mem::zeroed() }
    }
}

/// A piece of memory of the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) begin: *mut u8,
    pub(super) end: *mut u8,
}

impl Span {
    pub(super) fn bytes(&self) -> u64 {
        self.end as u64 - self.begin as u64
    }
}

/// One kernel, as its library describes it.
#[repr(C)]
#[derive(Debug)]
pub(super) struct RawKernel {
    name: *const c_char,
    call: *const c_void,
    argument_bytes: *const u32,
    argument_alignments: *const u32,
    arguments: u32,
    threads_max: u32,
    groups: *const c_char,
    cached: u64,
    holds_pointers: u64,
}

/// One launch, for the library.
#[repr(C)]
pub(super) struct RawLaunch {
    pub(super) kernel: *const RawKernel,
    pub(super) arguments: *mut *mut c_void,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared_bytes: u32,
    pub(super) intra: u32,
    pub(super) intra_accesses_max: u64,
    pub(super) seed: u64,
    pub(super) first_serial: u32,
    pub(super) spare: u32,
    pub(super) shared: *const Span,
    pub(super) shared_spans: u64,
    pub(super) shared_cells: *mut u64,
    pub(super) stacks: *mut u8,
    pub(super) stack_bytes: u64,
    pub(super) views_low: u64,
    pub(super) views_bytes: u64,
    pub(super) view_bytes: u64,
    pub(super) context: *mut c_void,
    pub(super) find: unsafe extern "C" fn(*mut c_void, u64, *mut Window) -> u32,
    pub(super) written_until: unsafe extern "C" fn(*mut c_void, u64, u64) -> u64,
    pub(super) failure: RawFailure,
    pub(super) unwritten: RawFailure,
    pub(super) accesses: u64,
}

#[repr(C)]
struct RawLibrary {
    version: u32,
    kernels: u32,
    kernel: *const *const RawKernel,
    run: unsafe extern "C" fn(*mut RawLaunch),
    begin: *mut u8,
    end: *mut u8,
    dynamic_shared: *mut u8,
    shared_uses: *const c_char,
}

/// What is known of a kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) name: String,
    pub(super) raw: *const RawKernel,
    /// (size, alignment) of each argument.
    pub(super) arguments: Vec<(usize, usize)>,
    pub(super) threads_max: u32,
    /// A bit for each argument that is a `const T* __restrict__`.
    pub(super) cached: u64,
    /// Whether memory behind an argument may hold pointers.
    pub(super) holds_pointers: bool,
    /// The static shared memory that it can reach.
    pub(super) shared: Vec<Span>,
    /// The names of these variables.
    pub(super) shared_names: Vec<String>,
}

/// A loaded library. Unloaded with its last user, including queued launches.
#[derive(Debug)]
pub(super) struct Library {
    handle: *mut c_void,
    run: unsafe extern "C" fn(*mut RawLaunch),
    pub(super) kernels: Vec<Kernel>,
    /// Its addresses, and where the dynamic shared memory begins.
    pub(super) memory: Range<u64>,
    pub(super) dynamic_shared: u64,
    /// `kernel.cu:12 tile`: where static shared variables are named.
    pub(super) shared_uses: Vec<String>,
    /// The library as a file, to map addresses to lines.
    file: OwnedFd,
    /// With SIMCUDA_PTX.
    pub(super) second: Option<Second>,
}

// SAFETY: the pointers are to the library's constants and code, which stay as long as the library
// is loaded, which is as long as this lives. Its one function that changes anything, `run`, is
// called under the machine's lock only.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// The bytes of an image given to `cuModuleLoadData`, which has no length.
///
/// # Safety
/// `image` is a whole ELF file or a zero-terminated text.
unsafe fn image_bytes(image: *const u8) -> Result<Vec<u8>, CUresult> {
    const ELF: &[u8; 4] = b"\x7fELF";
    const HEADER_BYTES: usize = 64;
    // SAFETY: any image has 4 bytes, be it the shortest text of less and its zero.
    let is_elf = (0..4).all(|index| unsafe { *image.add(index) } == ELF[index]);
    if is_elf {
        // SAFETY: an ELF file begins with its header.
        let header = unsafe { std::slice::from_raw_parts(image, HEADER_BYTES) };
        let half = |at: usize| u64::from(u16::from_ne_bytes([header[at], header[at + 1]]));
        let sections_at = header[40..48]
            .iter()
            .rev()
            .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        // The table of sections is what linkers write last.
        let flags = PTX_LENGTH
            .rev()
            .fold(0, |sum, at| sum << 8 | u64::from(header[at]));
        let length = sections_at + half(58) * half(60) + flags;
        // SAFETY: the file reaches to the end of its table.
        return Ok(unsafe { std::slice::from_raw_parts(image, length as usize) }.to_vec());
    }
    // SAFETY: what is no ELF file is a text with a zero behind.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    let digits = text
        .strip_prefix(PTX_HEADER.as_bytes())
        .ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    let digit = |byte: u8| {
        char::from(byte)
            .to_digit(16)
            .ok_or(CUresult::CUDA_ERROR_INVALID_PTX)
    };
    digits
        .chunks_exact(2)
        .map(|pair| Ok((digit(pair[0])? << 4 | digit(pair[1])?) as u8))
        .collect()
}

/// Whether the image is text, which is compiled for the loading device.
///
/// # Safety
/// As [`image_bytes`].
unsafe fn is_text(image: *const u8) -> bool {
    // SAFETY: any image has a first byte.
    unsafe { *image != 0x7f }
}

/// The PTX behind an image, which is cut off.
fn split_ptx(image: &mut Vec<u8>) -> Option<String> {
    let flags = image.get_mut(PTX_LENGTH)?;
    let length = flags
        .iter()
        .rev()
        .fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    flags.fill(0);
    let start = image.len().checked_sub(length).filter(|_| length > 0)?;
    String::from_utf8(image.split_off(start)).ok()
}

/// An unlinked file.
fn memory_file(bytes: &[u8]) -> Option<OwnedFd> {
    // SAFETY: the name is a text; the descriptor is new and ours.
    let file = unsafe {
        let descriptor = libc::memfd_create(c"simulated-kernels".as_ptr(), libc::MFD_CLOEXEC);
        (descriptor >= 0).then(|| OwnedFd::from_raw_fd(descriptor))?
    };
    let mut at = 0;
    while at < bytes.len() {
        // SAFETY: `bytes` from `at` on are ours to read.
        let written = unsafe {
            libc::write(
                file.as_raw_fd(),
                bytes[at..].as_ptr().cast(),
                bytes.len() - at,
            )
        };
        at += usize::try_from(written).ok()?;
    }
    Some(file)
}

impl Library {
    /// Loads an image for a device of this compute capability (90 for 9.0).
    ///
    /// # Safety
    /// `image` is null, or what NVRTC gave: an image whole, or a text that ends with a zero.
    pub(super) unsafe fn load(image: *const u8, capability: u32) -> Result<Self, CUresult> {
        if image.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: as the caller says.
        let (mut bytes, is_text) = unsafe { (image_bytes(image)?, is_text(image)) };
        let ptx = split_ptx(&mut bytes);
        let file = memory_file(&bytes).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let path = std::ffi::CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .expect("a number has no zero byte");
        // SAFETY: the path is a text. What the library does when it is loaded is the shim's:
        // nothing.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror gives a text or null; it was just set.
            let why = unsafe { libc::dlerror() };
            let why = if why.is_null() {
                "unknown".into()
            } else {
                unsafe_text(why)
            };
            eprintln!("simcuda: cuModuleLoadData: the image cannot be loaded: {why}");
            return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
        }
        // From here on drop closes the handle.
        let mut library = Self {
            handle,
            run: never,
            kernels: Vec::new(),
            memory: 0..0,
            dynamic_shared: 0,
            shared_uses: Vec::new(),
            file,
            second: ptx.map(Second::new),
        };
        // SAFETY: the symbols, if they are there, are what the table that NVRTC's room writes says
        // they are.
        unsafe {
            let architecture = library
                .symbol::<u32>(c"simcuda_architecture")
                .ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
            let raw = library
                .symbol::<RawLibrary>(c"simcuda_library")
                .ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
            // Text is compiled for the device; code runs on its major version, from its minor
            // version on.
            let fits = if is_text {
                *architecture <= capability
            } else {
                *architecture <= capability && architecture / 10 == capability / 10
            };
            if !fits {
                return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
            }
            if raw.version != ABI_VERSION {
                return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
            }
            library.run = raw.run;
            library.memory = raw.begin as u64..raw.end as u64;
            library.dynamic_shared = raw.dynamic_shared as u64;
            let uses = CStr::from_ptr(raw.shared_uses).to_string_lossy();
            library.shared_uses = uses.lines().map(str::to_owned).collect();
            let variables =
                symbols::shared_variables(&bytes).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
            let kernels = std::slice::from_raw_parts(raw.kernel, raw.kernels as usize);
            library.kernels = kernels
                .iter()
                .map(|kernel| Kernel::of(*kernel, raw.begin, &variables))
                .collect();
        }
        Ok(library)
    }

    /// A constant of the library.
    ///
    /// # Safety
    /// The symbol, if there is one, is a `T` that never changes.
    unsafe fn symbol<T>(&self, name: &CStr) -> Option<&'static T> {
        // SAFETY: the handle is open. The reference does not outlive `load`, in spite of its type.
        unsafe { libc::dlsym(self.handle, name.as_ptr()).cast::<T>().as_ref() }
    }

    /// The kernel of this name.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.kernels.iter().position(|kernel| kernel.name == name)
    }

    /// Runs a launch of one of its kernels.
    ///
    /// # Safety
    /// The launch is filled as `runtime.h` says, its kernel is of this library, and no other launch
    /// of it runs.
    pub(super) unsafe fn run(&self, launch: &mut RawLaunch) {
        // SAFETY: as the caller says.
        unsafe { (self.run)(launch) }
    }

    /// `kernel.cu:12` for an offset into the code, if binutils is installed.
    pub(super) fn line_of(&self, offset: u64) -> Option<String> {
        if offset == 0 {
            return None;
        }
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd());
        // The call's address: a return address points after the call.
        let output = std::process::Command::new("addr2line")
            .args(["-e", &path, &format!("{:#x}", offset - 1)])
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let place = text.lines().next()?.split(" (").next()?;
        let (file, line) = place.rsplit_once(':')?;
        let file = file.rsplit('/').next()?;
        (!file.starts_with('?') && line.parse::<u32>().is_ok()).then(|| format!("{file}:{line}"))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle is open and closed once; nobody holds this library, so nothing of it
        // is used any more.
        unsafe { libc::dlclose(self.handle) };
    }
}

unsafe extern "C" fn never(_: *mut RawLaunch) {}

fn unsafe_text(text: *const c_char) -> String {
    // SAFETY: called with what dlerror gave, which is a text.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

impl Kernel {
    /// # Safety
    /// `raw` is an entry of a loaded library's table.
    unsafe fn of(raw: *const RawKernel, begin: *mut u8, variables: &[Variable]) -> Self {
        // SAFETY: as the caller says; the arrays have as many entries as stands beside them.
        unsafe {
            let kernel = &*raw;
            let count = kernel.arguments as usize;
            let bytes = std::slice::from_raw_parts(kernel.argument_bytes, count);
            let alignments = std::slice::from_raw_parts(kernel.argument_alignments, count);
            let groups = CStr::from_ptr(kernel.groups).to_string_lossy();
            let mine: Vec<&Variable> = variables
                .iter()
                .filter(|variable| groups.split(' ').any(|group| group == variable.group))
                .collect();
            let shared = mine.iter().map(|variable| {
                let begin = begin.wrapping_add(variable.offset as usize);
                Span {
                    begin,
                    end: begin.wrapping_add(variable.bytes as usize),
                }
            });
            Self {
                name: CStr::from_ptr(kernel.name).to_string_lossy().into_owned(),
                raw,
                arguments: bytes
                    .iter()
                    .zip(alignments)
                    .map(|(bytes, alignment)| (*bytes as usize, *alignment as usize))
                    .collect(),
                threads_max: kernel.threads_max.min(THREADS_MAX),
                cached: kernel.cached,
                holds_pointers: kernel.holds_pointers != 0,
                shared: shared.collect(),
                shared_names: mine.iter().map(|variable| variable.name.clone()).collect(),
            }
        }
    }

    /// What CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES says.
    pub(super) fn static_shared_bytes(&self) -> u64 {
        self.shared.iter().map(Span::bytes).sum()
    }
}

//! Modules: PTX that NVRTC made, alone or in the envelope that is a CUBIN here.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use ddp_ptx::{Kernel, Module, Refusal};

use crate::error::CUresult;
use crate::nvrtc::CUBIN_HEADER;

/// The most threads a block can have.
pub(super) const THREADS_MAX: u32 = 1024;

/// A loaded module.
#[derive(Clone, Debug)]
pub(super) struct Library(Arc<Read>);

/// What a text says.
#[derive(Debug)]
struct Read {
    module: Module,
    /// Kernels are decoded when they are first asked for.
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
}

/// All texts that were read: tests in one process load the same ones again and again.
static READ: Mutex<BTreeMap<String, Arc<Read>>> = Mutex::new(BTreeMap::new());

impl Read {
    fn of(text: String) -> Result<Arc<Read>, Refusal> {
        let mut all = READ.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&text) {
            return Ok(Arc::clone(known));
        }
        let read = Arc::new(Read {
            module: Module::parse(&text)?,
            kernels: Mutex::default(),
        });
        all.insert(text, Arc::clone(&read));
        Ok(read)
    }
}

/// The PTX of an image given to `cuModuleLoadData`, which has no length, and whether it was in an
/// envelope.
///
/// # Safety
/// `image` is a whole CUBIN of this simulator or a zero-terminated text.
unsafe fn text_of(image: *const u8) -> Result<(String, bool), CUresult> {
    let header = CUBIN_HEADER.len();
    // SAFETY: the first byte that differs may be the zero that ends a text; none after it is read.
    let is_cubin = (0..header).all(|index| unsafe { *image.add(index) } == CUBIN_HEADER[index]);
    // SAFETY: the length follows the header, and so many bytes follow the length; what has no
    // header is a text with a zero at its end.
    let bytes = unsafe {
        if is_cubin {
            let length = image.add(header).cast::<u64>().read_unaligned();
            std::slice::from_raw_parts(image.add(header + 8), length as usize)
        } else {
            CStr::from_ptr(image.cast()).to_bytes()
        }
    };
    let text = std::str::from_utf8(bytes).map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    Ok((text.to_owned(), is_cubin))
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
        let (text, is_cubin) = unsafe { text_of(image)? };
        if !text.contains(".version") {
            return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
        }
        let read = Read::of(text).map_err(|refusal| {
            eprintln!("simcuda: cuModuleLoadData: {refusal}");
            CUresult::CUDA_ERROR_INVALID_PTX
        })?;
        let (architecture, suffix) = read
            .module
            .target()
            .ok_or(CUresult::CUDA_ERROR_INVALID_PTX)?;
        // PTX is compiled for the device; code runs on its major version, from its minor version
        // on. What is for one architecture alone runs on no other.
        let fits = match suffix {
            "a" => architecture == capability,
            _ if is_cubin => architecture <= capability && architecture / 10 == capability / 10,
            _ => architecture <= capability,
        };
        if !fits {
            return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        Ok(Self(read))
    }

    /// How many kernels it has.
    pub(super) fn count(&self) -> usize {
        self.0.module.kernels().count()
    }

    /// The kernel of this name.
    pub(super) fn find(&self, name: &str) -> Result<Arc<Kernel>, CUresult> {
        let mut kernels = self
            .0
            .kernels
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kernels.get(name) {
            return Ok(Arc::clone(known));
        }
        let decoded = self
            .0
            .module
            .kernel(name)
            .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let kernel = decoded.map_err(|refusal| {
            eprintln!("simcuda: cuModuleGetFunction: kernel {name}: {refusal}");
            CUresult::CUDA_ERROR_INVALID_PTX
        })?;
        let kernel = Arc::new(kernel);
        kernels.insert(name.to_owned(), Arc::clone(&kernel));
        Ok(kernel)
    }
}

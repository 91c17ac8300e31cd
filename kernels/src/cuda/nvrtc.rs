//! `.cu` files compiled by NVRTC for the device at hand, at first use, and kept on disk.
//!
//! Each file is compiled by itself, with `common.cuh` as the one header. Its options are those of `Compiler::options`; above
//! all `--fmad=false`: a product and a sum are two roundings unless the source says `fmaf`, as in Rust. Machine code
//! is kept in `cache.rs` under everything it depends on. Once a kernel was found, finding it again takes no lock and
//! allocates nothing.

mod cache;
mod compiler;

use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use cudarc::driver::sys::{CUfunction, CUmodule, CUresult};

use super::capture;
use super::fault::{Fault, Outcome, describe, driver};
use super::gpu::{GPUS_MAX, Gpu, Handle};
use super::launch::Source;
use crate::device::discover;
use crate::error::{Error, Result, Site};
use compiler::{Compiler, Target};

/// What was compiled and loaded of one source.
pub(crate) struct Loaded {
    /// By device.
    modules: [OnceLock<Box<Module>>; GPUS_MAX],
    /// Held while the source is compiled or loaded. Inside, the last image: devices of one kind share it.
    making: Mutex<Option<(Target, Arc<[u8]>)>>,
}

impl Loaded {
    pub(crate) const fn new() -> Loaded {
        Loaded { modules: [const { OnceLock::new() }; GPUS_MAX], making: Mutex::new(None) }
    }
}

/// How many kernels of one source are found without asking the driver: twice as many as any has.
const KERNELS_MAX: usize = 128;

/// A source on a device: loaded for the rest of the process.
struct Module {
    handle: Handle<CUmodule>,
    /// Kernels by the ADDRESS of their name, from the slot that it picks on: comparing addresses is all a look-up costs.
    /// A name that the compiler made twice is found twice.
    kernels: [OnceLock<(&'static str, Handle<CUfunction>)>; KERNELS_MAX],
}

/// The kernel `name` of `source` on `gpu`.
#[inline]
pub(crate) fn function(
    gpu: &'static Gpu,
    source: &'static Source,
    name: &'static str,
    op: &'static str,
    at: Site,
) -> Result<CUfunction> {
    if let Some(module) = source.loaded.modules[gpu.index].get()
        && let Some(function) = module.known(name)
    {
        return Ok(function);
    }
    Making { gpu, source, op, at }.function(name)
}

impl Module {
    fn slots(&self, name: &'static str) -> impl Iterator<Item = &OnceLock<(&'static str, Handle<CUfunction>)>> {
        let address = name.as_ptr().addr();
        let first = (address ^ (address >> 7)) % KERNELS_MAX;
        self.kernels[first..].iter().chain(&self.kernels[..first])
    }

    #[inline]
    fn known(&self, name: &'static str) -> Option<CUfunction> {
        for slot in self.slots(name) {
            let (known, function) = slot.get()?;
            if ptr::eq(*known, name) {
                return Some(function.0);
            }
        }
        None
    }

    fn remember(&self, name: &'static str, function: CUfunction) {
        for slot in self.slots(name) {
            let (known, _) = slot.get_or_init(|| (name, Handle(function)));
            if ptr::eq(*known, name) {
                return;
            }
        }
    }
}

/// A kernel that was not used on this device before.
struct Making {
    gpu: &'static Gpu,
    source: &'static Source,
    op: &'static str,
    at: Site,
}

impl Making {
    fn function(&self, name: &'static str) -> Result<CUfunction> {
        // Loading code may wait for the whole device.
        if capture::is_capturing() {
            let why = format!("{name} is used for the first time. Run the step once before capturing");
            return Err(Error::Capture { op: self.op, device: self.gpu.device(), why, at: self.at });
        }
        let module = self.module()?;
        let mut function = ptr::null_mut();
        let c_name = CString::new(name).map_err(|_| self.problem(format!("{name:?} is no name")))?;
        // SAFETY: the module is loaded in this context for good; the pointers are to variables of ours.
        let found = self
            .gpu
            .bind()
            .and_then(|()| unsafe { driver!(cuModuleGetFunction(&mut function, module.handle.0, c_name.as_ptr())) });
        match found {
            Ok(()) => module.remember(name, function),
            Err(Fault { code: CUresult::CUDA_ERROR_NOT_FOUND, .. }) => {
                return Err(self.problem(format!("it has no kernel called {name}")));
            }
            Err(fault) => return Err(self.refused(fault)),
        }
        Ok(function)
    }

    fn module(&self) -> Result<&'static Module> {
        let place = &self.source.loaded.modules[self.gpu.index];
        // A panic in here leaves nothing half done.
        let mut made = self.source.loaded.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = place.get() {
            return Ok(module);
        }
        let compiler = compiler::get().map_err(|why| self.problem(why))?;
        let target = compiler.target(self.gpu.capability).map_err(|why| self.problem(why))?;
        let handle = match &*made {
            Some((known, image)) if *known == target => {
                self.load(image).map_err(|fault| self.unloadable(fault, compiler))?
            }
            _ => {
                let (image, handle) = self.image(compiler, target)?;
                *made = Some((target, image));
                handle
            }
        };
        Ok(place.get_or_init(|| {
            Box::new(Module { handle: Handle(handle), kernels: [const { OnceLock::new() }; KERNELS_MAX] })
        }))
    }

    /// The source compiled, now or by an earlier process, and loaded.
    fn image(&self, compiler: &Compiler, target: Target) -> Result<(Arc<[u8]>, CUmodule)> {
        let name = self.source.name;
        let label = format!("{}-{target}", name.trim_end_matches(".cu"));
        let entry = cache::Entry::of_process(&label, key(compiler, target, self.source.text));
        if let Some(image) = entry.read() {
            match self.load(&image) {
                Ok(handle) => return Ok((image.into(), handle)),
                Err(fault) => {
                    tracing::debug!("compiling {name} again: the driver refused the one on disk ({:?})", fault.code)
                }
            }
        }
        if let Target::Ptx(_) = target {
            let (major, minor) = self.gpu.capability;
            tracing::warn!(
                "{compiler} does not know sm_{major}{minor}, which {} is: {name} is compiled for {target} and the driver goes \
                 on from there. Install a newer NVRTC for kernels of the GPU's own kind",
                self.gpu.device()
            );
        }
        let start = Instant::now();
        let image = compiler.compile(name, self.source.text, target).map_err(|why| self.problem(why))?;
        tracing::debug!("{compiler} compiled {name} for {target} in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
        let handle = self.load(&image).map_err(|fault| self.unloadable(fault, compiler))?;
        entry.write(&image);
        Ok((image.into(), handle))
    }

    fn load(&self, image: &[u8]) -> Outcome<CUmodule> {
        self.gpu.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the context is current. The image is whole, as the compiler made it (PTX ends in the zero byte that the
        // driver looks for), and the driver copies what it needs of it.
        unsafe { driver!(cuModuleLoadData(&mut handle, image.as_ptr().cast())) }?;
        Ok(handle)
    }

    fn problem(&self, problem: impl Into<String>) -> Error {
        let (op, device, at) = (self.op, self.gpu.device(), self.at);
        Error::Kernel { op, source_name: self.source.name, device, problem: problem.into(), at }
    }

    fn refused(&self, fault: Fault) -> Error {
        fault.of(self.op, self.gpu.device(), self.at)
    }

    /// The driver does not take what this compiler makes.
    fn unloadable(&self, fault: Fault, compiler: &Compiler) -> Error {
        use CUresult::{
            CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        };
        let of_versions = [
            CUDA_ERROR_INVALID_IMAGE,
            CUDA_ERROR_INVALID_PTX,
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        ];
        if !of_versions.contains(&fault.code) {
            return self.refused(fault);
        }
        let (name, meaning) = describe(fault.code);
        let supported = match discover().driver_version {
            Some((major, minor)) => format!("which supports CUDA {major}.{minor} at most"),
            None => "whose version is not known".to_string(),
        };
        self.problem(format!(
            "the driver, {supported}, does not load what {compiler} makes: {name} ({meaning}). Update the driver, or \
             install an NVRTC of the driver's version"
        ))
    }
}

/// Everything that an image depends on.
fn key(compiler: &Compiler, target: Target, text: &str) -> u128 {
    let (length, changed) = compiler.file;
    let mut key = cache::Key::new()
        .part(env!("CARGO_PKG_VERSION").as_bytes())
        .part(text.as_bytes())
        .part(compiler::HEADER.1.as_bytes())
        .part(compiler.to_string().as_bytes())
        .part(&length.to_le_bytes())
        .part(&changed.to_le_bytes());
    for option in compiler.options(target) {
        key = key.part(option.as_bytes());
    }
    key.finish()
}

//! `.cu` files, compiled by NVRTC for the device at first use and cached on disk.
//!
//! Each file is a separate compilation, with all `.cuh` files as headers and the options of
//! `compiler::options`. The main one is `--fmad=false`: as in Rust, a product and a sum are two
//! roundings unless the source says `fmaf`. `cache.rs` keeps the machine code under a hash of
//! everything it depends on. Finding a kernel again allocates nothing.

mod compiler;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Instant;

use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUmodule,
};

use super::cache;
use super::calls::CUresult;
use super::calls::{DriverFault, Outcome, describe, driver};
use super::devices::GPUS_MAX;
use super::gpu::{Gpu, Handle};
use super::queue::is_capturing;
use crate::DType;
use crate::device::{FoundGpu, discover};
use crate::error::{Caller, Error, Line, Result};
use crate::panics::{lock, read, write};
pub(crate) use compiler::text_of;
use compiler::{Arch, Compiler};

/// A `.cu` file of this crate, and its loaded modules.
pub(crate) struct CuFile {
    /// The file's name.
    name: &'static str,
    text: &'static str,
    /// By device.
    modules: [OnceLock<Box<LoadedModule>>; GPUS_MAX],
    /// Locked while the source is compiled or loaded. It keeps the last image, which devices of one
    /// kind share.
    making: Mutex<Option<(Arch, Arc<[u8]>)>>,
}

impl CuFile {
    pub(crate) const fn new(name: &'static str, text: &'static str) -> CuFile {
        CuFile {
            name,
            text,
            modules: [const { OnceLock::new() }; GPUS_MAX],
            making: Mutex::new(None),
        }
    }

    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }
}

/// The name of a kernel: `activate_f32` is `("activate", DType::F32)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelName {
    base: &'static str,
    dtype: Option<DType>,
}

impl From<&'static str> for KernelName {
    fn from(base: &'static str) -> KernelName {
        KernelName { base, dtype: None }
    }
}

impl From<(&'static str, DType)> for KernelName {
    fn from((base, dtype): (&'static str, DType)) -> KernelName {
        KernelName {
            base,
            dtype: Some(dtype),
        }
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            Some(dtype) => write!(f, "{}_{dtype}", self.base),
            None => f.write_str(self.base),
        }
    }
}

/// A source loaded on a device, for the rest of the process.
struct LoadedModule {
    handle: Handle<CUmodule>,
    kernels: RwLock<HashMap<KernelName, Handle<CUfunction>>>,
}

/// The kernel `name` of `source` on `gpu`, whose blocks may have `shared_bytes` of dynamic shared
/// memory.
#[inline]
pub(crate) fn function(
    gpu: &'static Gpu,
    source: &'static CuFile,
    name: KernelName,
    shared_bytes: u32,
    by: Caller,
) -> Result<CUfunction> {
    if let Some(module) = source.modules[gpu.index].get()
        && let Some(function) = module.known(name)
    {
        return Ok(function);
    }
    Making { gpu, source, by }.function(name, shared_bytes)
}

impl LoadedModule {
    fn known(&self, name: KernelName) -> Option<CUfunction> {
        read(&self.kernels).get(&name).map(|function| function.0)
    }
}

/// Making a kernel that was not used on this device before.
struct Making {
    gpu: &'static Gpu,
    source: &'static CuFile,
    by: Caller,
}

impl Making {
    fn function(&self, name: KernelName, shared_bytes: u32) -> Result<CUfunction> {
        // Loading a module may wait for the whole device.
        if is_capturing() {
            let why = format!("the kernel {name} is used for the first time");
            let help = "run the step once before you capture it";
            return Err(self.by.capture(self.gpu.device(), why, help));
        }
        let module = self.module()?;
        let mut function = ptr::null_mut();
        let c_name = CString::new(name.to_string()).expect("a kernel's name has no zero byte");
        let (handle, symbol) = (module.handle.0, c_name.as_ptr());
        // SAFETY: the module stays loaded in this context; the pointers are to local variables.
        let mut find = || unsafe { driver!(cuModuleGetFunction(&mut function, handle, symbol)) };
        let found = self.gpu.bind().and_then(|()| find());
        match found {
            Ok(()) => {
                // Without being allowed more, a block has 48 KB, with what the kernel declares.
                if shared_bytes > 0 {
                    let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    let bytes = shared_bytes as i32;
                    // SAFETY: the function belongs to this context.
                    unsafe { driver!(cuFuncSetAttribute(function, attribute, bytes)) }
                        .map_err(|fault| self.refused(fault))?;
                }
                write(&module.kernels).insert(name, Handle(function));
            }
            Err(DriverFault {
                code: CUresult::CUDA_ERROR_NOT_FOUND,
                ..
            }) => {
                return Err(self.problem(format!("it has no kernel called {name}")));
            }
            Err(fault) => return Err(self.refused(fault)),
        }
        Ok(function)
    }

    fn module(&self) -> Result<&'static LoadedModule> {
        let place = &self.source.modules[self.gpu.index];
        let mut made = lock(&self.source.making);
        if let Some(module) = place.get() {
            return Ok(module);
        }
        let compiler = compiler::get().map_err(|why| self.problem(why))?;
        let target = compiler
            .target(self.gpu.capability)
            .map_err(|why| self.problem(why))?;
        let handle = match &*made {
            Some((known, image)) if *known == target => self
                .load(image)
                .map_err(|fault| self.unloadable(fault, compiler))?,
            _ => {
                let (image, handle) = self.image(compiler, target)?;
                *made = Some((target, image));
                handle
            }
        };
        Ok(place.get_or_init(|| {
            Box::new(LoadedModule {
                handle: Handle(handle),
                kernels: RwLock::default(),
            })
        }))
    }

    /// The source, compiled now or by an earlier process, and loaded.
    fn image(&self, compiler: &'static Compiler, target: Arch) -> Result<(Arc<[u8]>, CUmodule)> {
        let compilation = Compilation::new(self.source, compiler, target);
        let (mut cached, mut _turn) = (compilation.entry.read(), None);
        if cached.is_none() {
            // Ranks of a host need the same file at the same time: one compiles it.
            _turn = compilation.entry.turn();
            cached = compilation.entry.read();
        }
        if let Some(image) = cached {
            match self.load(&image) {
                Ok(handle) => return Ok((image.into(), handle)),
                Err(DriverFault { code, .. }) => {
                    let name = self.source.name;
                    tracing::debug!("the cached {name} is not used: it gave {code:?}");
                }
            }
        }
        // Ranks with few cores do not compile ahead.
        let said = format!(
            "compiling {}, which is needed for the first time",
            self.source.name
        );
        let gpu = discover().gpus.get(self.gpu.index);
        if gpu.is_some_and(FoundGpu::is_simulated) {
            tracing::debug!("{said}");
        } else {
            tracing::info!("{said}");
        }
        let image = compilation.run().map_err(|why| self.problem(why))?;
        let handle = self
            .load(&image)
            .map_err(|fault| self.unloadable(fault, compiler))?;
        compilation.entry.write(&image);
        Ok((image.into(), handle))
    }

    fn load(&self, image: &[u8]) -> Outcome<CUmodule> {
        self.gpu.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the context is current. The image is complete, as the compiler made it, and the
        // driver copies it.
        unsafe { driver!(cuModuleLoadData(&mut handle, image.as_ptr().cast())) }?;
        Ok(handle)
    }

    fn problem(&self, problem: impl std::fmt::Display) -> Error {
        let (source, device) = (self.source.name, self.gpu.device());
        let (op, line) = (self.by.op, Line(self.by.at));
        Error::Kernel(format!(
            "{op}: cannot build {source} for {device} ({line}): {problem}"
        ))
    }

    fn refused(&self, fault: DriverFault) -> Error {
        fault.of(self.by, self.gpu.device())
    }

    /// The error for an image of this compiler that the driver does not load.
    fn unloadable(&self, fault: DriverFault, compiler: &Compiler) -> Error {
        let of_versions = [
            CUresult::CUDA_ERROR_INVALID_IMAGE,
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        ];
        if !of_versions.contains(&fault.code) {
            return self.refused(fault);
        }
        let (name, meaning) = describe(fault.code);
        let supported = match discover().driver_version {
            Some((major, minor)) => format!("which supports CUDA up to {major}.{minor}"),
            None => "whose version is unknown".to_string(),
        };
        self.problem(format!(
            "the driver, {supported}, does not load the output of {compiler}: {name} ({meaning}); \
             help: update the driver, or install an NVRTC of the driver's version"
        ))
    }
}

/// A file to be compiled for one kind of GPU, and its place in the cache.
pub(crate) struct Compilation {
    pub(crate) name: &'static str,
    text: Cow<'static, str>,
    compiler: &'static Compiler,
    target: Arch,
    pub(crate) entry: cache::CacheEntry,
}

impl Compilation {
    fn new(source: &CuFile, compiler: &'static Compiler, target: Arch) -> Compilation {
        let (name, text) = (source.name, text_of(source.name, source.text));
        let label = format!("{}-sm_{}", name.trim_end_matches(".cu"), target.0);
        let entry = cache::CacheEntry::of_process(&label, key(compiler, target, &text));
        Compilation {
            name,
            text,
            compiler,
            target,
            entry,
        }
    }

    /// Those of `sources` for GPUs of a compute capability, or what is missing for that.
    pub(crate) fn all(
        sources: impl Iterator<Item = &'static CuFile>,
        capability: (u32, u32),
    ) -> std::result::Result<Vec<Compilation>, String> {
        let compiler = compiler::get()?;
        let target = compiler.target(capability)?;
        Ok(sources
            .map(|source| Compilation::new(source, compiler, target))
            .collect())
    }

    /// The image, or the compiler's log.
    pub(crate) fn run(&self) -> std::result::Result<Vec<u8>, String> {
        let (name, compiler, start) = (self.name, self.compiler, Instant::now());
        let image = compiler.compile(name, &self.text, self.target)?;
        tracing::debug!(
            "{compiler} compiled {name} for sm_{} in {:.0} ms",
            self.target.0,
            start.elapsed().as_secs_f64() * 1e3
        );
        Ok(image)
    }
}

/// Everything that an image depends on.
fn key(compiler: &Compiler, target: Arch, text: &str) -> u128 {
    let (length, changed) = compiler.file;
    let mut key = cache::Key::new()
        .part(env!("CARGO_PKG_VERSION").as_bytes())
        .part(text.as_bytes())
        .part(compiler.to_string().as_bytes())
        .part(&length.to_le_bytes())
        .part(&changed.to_le_bytes());
    for (_, header) in compiler::headers() {
        key = key.part(header.as_bytes());
    }
    for option in compiler::options(target, text) {
        key = key.part(option.as_bytes());
    }
    key.finish()
}

//! Kernels: modules, functions, launches, and the exact ranges that a launch touches. A kernel's
//! code is PTX; `ddp-ptx` runs its threads and watches their accesses.

mod launch;
mod library;
mod message;
// Some tests mean a list with one range, not the numbers in it.
#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUfunction_attribute as Attribute, CUstream};

use ddp_ptx::Kernel;

use self::launch::KernelLaunch;
use self::library::{Library, THREADS_MAX};
use crate::error::CUresult;
use crate::graph::capture;
use crate::machine::{self, Machine, Out, put};
use crate::stream;

/// Shared memory per block without an opt-in attribute, and with it.
const SHARED_BYTES: u64 = 48 << 10;
const SHARED_BYTES_MAX: u64 = 227 << 10;
const GRID_MAX: [u64; 3] = [i32::MAX as u64, 65535, 65535];
const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
const THREADS_PER_MULTIPROCESSOR: u64 = 2048;
const SHARED_BYTES_PER_MULTIPROCESSOR: u64 = 228 << 10;
/// Per block, in addition to what it requests.
const SHARED_BYTES_RESERVED: u64 = 1 << 10;
const BLOCKS_PER_MULTIPROCESSOR: u64 = 32;

/// A kernel of a loaded module.
#[derive(Debug)]
struct Function {
    module: usize,
    /// The context that was current when the module was loaded.
    device: usize,
    kernel: Arc<Kernel>,
    /// The value of CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    dynamic_shared_max: AtomicU32,
}

/// All modules with their devices, and functions, by handle. Handles are numbers that no allocator
/// returns, and unique.
#[derive(Debug)]
struct Handles {
    next: usize,
    modules: BTreeMap<usize, (usize, Arc<Library>)>,
    functions: BTreeMap<usize, Arc<Function>>,
}

static HANDLES: Mutex<Handles> = Mutex::new(Handles {
    next: 0x10,
    modules: BTreeMap::new(),
    functions: BTreeMap::new(),
});

fn handles() -> MutexGuard<'static, Handles> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handles {
    fn take(&mut self) -> usize {
        self.next += 0x10;
        self.next - 0x10
    }
}

fn function(handle: usize) -> Result<Arc<Function>, CUresult> {
    handles()
        .functions
        .get(&handle)
        .cloned()
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// 90 for 9.0.
fn capability(machine: &Machine, device: usize) -> u32 {
    let (major, minor) = machine.devices[device].capability;
    major * 10 + minor
}

/// # Safety
/// As [`cuModuleLoadData`].
unsafe fn load(name: &'static str, module: Out<'_, usize>, image: *const c_void) -> CUresult {
    machine::call(name, |machine| {
        let device = machine::current_device(machine)?;
        capture::forbid(machine, name)?;
        // SAFETY: as the caller says.
        let library = unsafe { Library::load(image.cast(), capability(machine, device))? };
        let mut handles = handles();
        let handle = handles.take();
        put(module, handle)?;
        handles.modules.insert(handle, (device, Arc::new(library)));
        Ok(())
    })
}

/// See the driver's documentation. Images come from this machine's NVRTC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(
    module: Out<'_, usize>,
    image: *const c_void,
) -> CUresult {
    // SAFETY: the documentation asks for a whole image.
    unsafe { load("cuModuleLoadData", module, image) }
}

/// See the driver's documentation. The options concern compilation, which is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: Out<'_, usize>,
    image: *const c_void,
    _count: u32,
    _options: *mut c_int,
    _values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the documentation asks for a whole image.
    unsafe { load("cuModuleLoadDataEx", module, image) }
}

/// See the driver's documentation. Its functions become invalid; queued launches keep the code.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: usize) -> CUresult {
    machine::call("cuModuleUnload", |machine| {
        capture::forbid(machine, "cuModuleUnload")?;
        let mut handles = handles();
        handles
            .modules
            .remove(&module)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        handles
            .functions
            .retain(|_, function| function.module != module);
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    to: Out<'_, usize>,
    module: usize,
    name: *const c_char,
) -> CUresult {
    machine::call("cuModuleGetFunction", |machine| {
        if name.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the documentation asks for a text.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let mut handles = handles();
        let (device, library) = handles
            .modules
            .get(&module)
            .cloned()
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let kernel = library.find(&name)?;
        let known = handles
            .functions
            .iter()
            .find(|(_, known)| known.module == module && known.kernel.name() == name);
        if let Some((handle, _)) = known {
            return put(to, *handle);
        }
        // Lazy loading "will delay loading of a kernel until cuModuleGetFunction() is called" (CUDA
        // C++ Programming Guide): it may allocate, or wait for the device.
        capture::forbid(machine, "cuModuleGetFunction, which loads the kernel,")?;
        let handle = handles.take();
        put(to, handle)?;
        let dynamic_shared_max = AtomicU32::new(default_dynamic_shared(&kernel));
        handles.functions.insert(
            handle,
            Arc::new(Function {
                module,
                device,
                kernel,
                dynamic_shared_max,
            }),
        );
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunctionCount(count: Out<'_, u32>, module: usize) -> CUresult {
    machine::call("cuModuleGetFunctionCount", |_| {
        let handles = handles();
        let (_, library) = handles
            .modules
            .get(&module)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        put(count, library.count() as u32)
    })
}

/// The most threads of its blocks.
fn threads_max(kernel: &Kernel) -> u32 {
    kernel.threads_max().unwrap_or(THREADS_MAX).min(THREADS_MAX)
}

fn default_dynamic_shared(kernel: &Kernel) -> u32 {
    SHARED_BYTES.saturating_sub(kernel.static_shared_bytes()) as u32
}

/// See the driver's documentation. Registers, local and constant memory are not simulated: fixed
/// values.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(
    value: Out<'_, c_int>,
    attribute: u32,
    handle: usize,
) -> CUresult {
    machine::call("cuFuncGetAttribute", |machine| {
        let function = function(handle)?;
        let is = |wanted: Attribute| attribute == wanted as u32;
        let answer = if is(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) {
            threads_max(&function.kernel) as c_int
        } else if is(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) {
            function.kernel.static_shared_bytes() as c_int
        } else if is(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
            function.dynamic_shared_max.load(Ordering::Relaxed) as c_int
        } else if is(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS) {
            32
        } else if is(Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)
            || is(Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION)
        {
            capability(machine, function.device) as c_int
        } else if is(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
            -1
        } else if attribute < Attribute::CU_FUNC_ATTRIBUTE_MAX as u32 {
            0
        } else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        put(value, answer)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(handle: usize, attribute: u32, value: c_int) -> CUresult {
    machine::call("cuFuncSetAttribute", |_| {
        let function = function(handle)?;
        if attribute == Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32 {
            let room = SHARED_BYTES_MAX.saturating_sub(function.kernel.static_shared_bytes());
            let bytes = u32::try_from(value)
                .ok()
                .filter(|bytes| u64::from(*bytes) <= room);
            function.dynamic_shared_max.store(
                bytes.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
                Ordering::Relaxed,
            );
            return Ok(());
        }
        let is_carveout =
            attribute == Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT as u32;
        if is_carveout && (-1..=100).contains(&value) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        }
    })
}

/// See the driver's documentation. A preference, without effect here.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetCacheConfig(handle: usize, _config: u32) -> CUresult {
    machine::call("cuFuncSetCacheConfig", |_| function(handle).map(drop))
}

/// See the driver's documentation. Registers are not simulated and limit nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    count: Out<'_, c_int>,
    handle: usize,
    block_threads: c_int,
    dynamic_shared_bytes: usize,
) -> CUresult {
    machine::call("cuOccupancyMaxActiveBlocksPerMultiprocessor", |_| {
        let function = function(handle)?;
        let threads = u64::try_from(block_threads)
            .ok()
            .filter(|threads| *threads > 0)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if threads > u64::from(threads_max(&function.kernel))
            || dynamic_shared_bytes as u64 > SHARED_BYTES_MAX
        {
            return put(count, 0);
        }
        let shared = function.kernel.static_shared_bytes()
            + dynamic_shared_bytes as u64
            + SHARED_BYTES_RESERVED;
        let by_threads = THREADS_PER_MULTIPROCESSOR / threads.next_multiple_of(32);
        let by_shared = SHARED_BYTES_PER_MULTIPROCESSOR / shared;
        put(
            count,
            by_threads.min(by_shared).min(BLOCKS_PER_MULTIPROCESSOR) as c_int,
        )
    })
}

/// Checks the shape of a launch against the limits of the device and the kernel.
fn check_shape(
    function: &Function,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared_bytes: u32,
) -> Result<(), CUresult> {
    let grid_fits = grid
        .iter()
        .zip(GRID_MAX)
        .all(|(size, max)| *size > 0 && u64::from(*size) <= max);
    let block_fits = block
        .iter()
        .zip(BLOCK_MAX)
        .all(|(size, max)| *size > 0 && *size <= max);
    let threads: u64 = block.iter().map(|size| u64::from(*size)).product();
    if !grid_fits
        || !block_fits
        || dynamic_shared_bytes > function.dynamic_shared_max.load(Ordering::Relaxed)
    {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // Exceeding the device's limit is an invalid value; exceeding __launch_bounds__ is "too few
    // resources".
    if threads > u64::from(THREADS_MAX) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if threads > u64::from(threads_max(&function.kernel)) {
        return Err(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    }
    Ok(())
}

/// Copies the arguments: after the call the caller may reuse its memory.
///
/// # Safety
/// `parameters` has a pointer to each of the kernel's arguments.
unsafe fn copy_arguments(
    kernel: &Kernel,
    parameters: *const *const c_void,
) -> Result<Vec<Vec<u8>>, CUresult> {
    let mut arguments = Vec::new();
    for (index, bytes) in kernel.parameters().enumerate() {
        if parameters.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller has as many pointers as the kernel has arguments.
        let source = unsafe { *parameters.add(index) };
        if source.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's value has this size.
        let value = unsafe { std::slice::from_raw_parts(source.cast::<u8>(), bytes as usize) };
        arguments.push(value.to_vec());
    }
    Ok(arguments)
}

/// See the driver's documentation. `extra` is not simulated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    handle: usize,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    dynamic_shared_bytes: u32,
    stream: CUstream,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> CUresult {
    machine::call("cuLaunchKernel", |machine| {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        if !extra.is_null() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let function = function(handle)?;
        check_shape(&function, grid, block, dynamic_shared_bytes)?;
        // SAFETY: the documentation asks for a pointer to each argument.
        let arguments = unsafe { copy_arguments(&function.kernel, parameters)? };
        let stream = stream::resolve(machine, stream)?;
        // A function belongs to the context that loaded it.
        if stream::device_of(machine, stream) != function.device {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        stream::check_current(machine, function.device, || {
            format!("kernel {}", function.kernel.name())
        })?;
        let launch = KernelLaunch {
            kernel: Arc::clone(&function.kernel),
            grid,
            block,
            dynamic_shared_bytes,
            arguments,
            seed: next_seed(machine),
            runs: AtomicU64::new(0),
        };
        stream::enqueue(machine, stream, Arc::new(launch))
    })
}

/// A new seed for every launch, derived from the machine's seed.
fn next_seed(machine: &Machine) -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    machine.config.seed.wrapping_mul(0x2545_f491_4f6c_dd1d)
        ^ LAUNCHES.fetch_add(1, Ordering::Relaxed) << 8
}

//! The part of the driver that the programs need, as raw calls, so that no wrapper hides a mistake.
//!
//! Handles are created here and never destroyed, so every handle is live. Device addresses are
//! numbers to the host; a wrong one is an error on the device, which some programs provoke, and not
//! undefined here.

use std::cell::OnceCell;
use std::ffi::{CStr, c_void};

use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::sys as nvrtc;

/// Floats on a device.
#[derive(Clone, Copy)]
pub(crate) struct Buffer(sys::CUdeviceptr);

impl Buffer {
    pub(crate) fn address(self) -> u64 {
        self.0
    }

    /// The floats after the first `count`.
    pub(crate) fn after(self, count: usize) -> Self {
        Self(self.0 + count as u64 * 4)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Stream(sys::CUstream);

impl Stream {
    pub(crate) fn raw(self) -> sys::CUstream {
        self.0
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Event(sys::CUevent);

#[derive(Clone, Copy)]
pub(crate) struct Graph(sys::CUgraphExec);

/// Floats in pinned memory; they live as long as the process.
pub(crate) struct Pinned {
    pointer: *mut f32,
    count: usize,
}

impl Pinned {
    pub(crate) fn get(&self, index: usize) -> f32 {
        assert!(index < self.count);
        // SAFETY: in bounds, aligned, and never freed. Volatile, because a copy may be writing it.
        unsafe { self.pointer.add(index).read_volatile() }
    }

    pub(crate) fn fill(&self, value: f32) {
        for index in 0..self.count {
            // SAFETY: as in `get`.
            unsafe { self.pointer.add(index).write_volatile(value) };
        }
    }
}

fn check(call: &str, result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS, "{call}");
}

/// The names of all devices; empty without a driver.
pub(crate) fn device_names() -> Vec<String> {
    // SAFETY: only opens the library if it exists.
    if !unsafe { sys::is_culib_present() } {
        return Vec::new();
    }
    // SAFETY: the library exists, as checked above.
    if unsafe { sys::cuInit(0) } != CUresult::CUDA_SUCCESS {
        return Vec::new();
    }
    let mut count = 0;
    // SAFETY: writes to a local variable.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&raw mut count)
    });
    (0..count).map(name_of).collect()
}

fn name_of(device: sys::CUdevice) -> String {
    let mut name = [0u8; 256];
    // SAFETY: writes at most the 256 bytes of the buffer, with a final zero.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device)
    });
    CStr::from_bytes_until_nul(&name)
        .expect("it ends with a zero")
        .to_string_lossy()
        .into_owned()
}

/// A device, its primary context, and its kernels once they are used. Every method first makes the
/// context current.
pub(crate) struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    kernels: OnceCell<sys::CUmodule>,
    functions: [OnceCell<sys::CUfunction>; NAMES.len()],
}

impl Gpu {
    pub(crate) fn new(device: sys::CUdevice) -> Self {
        let mut context = std::ptr::null_mut();
        // SAFETY: the first call takes no pointer, the second writes to a local variable.
        unsafe {
            check("cuInit", sys::cuInit(0));
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&raw mut context, device),
            );
        }
        Self {
            device,
            context,
            kernels: OnceCell::new(),
            functions: Default::default(),
        }
    }

    pub(crate) fn make_current(&self) {
        // SAFETY: the context was retained by `new` and is never released.
        check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.context)
        });
    }

    pub(crate) fn stream(&self) -> Stream {
        self.make_current();
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes to a local variable.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&raw mut stream, flags)
        });
        Stream(stream)
    }

    pub(crate) fn event(&self) -> Event {
        self.make_current();
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes to a local variable.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&raw mut event, flags)
        });
        Event(event)
    }

    pub(crate) fn record(&self, event: Event, stream: Stream) {
        self.make_current();
        // SAFETY: both handles are live, like all handles of this module.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(event.0, stream.0)
        });
    }

    pub(crate) fn wait(&self, stream: Stream, event: Event) {
        self.make_current();
        // SAFETY: both handles are live.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream.0, event.0, 0)
        });
    }

    pub(crate) fn synchronize(&self, stream: Stream) {
        self.make_current();
        // SAFETY: the handle is live.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(stream.0)
        });
    }

    pub(crate) fn synchronize_event(&self, event: Event) {
        self.make_current();
        // SAFETY: the handle is live.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(event.0)
        });
    }

    /// `count` floats that all streams may use immediately.
    pub(crate) fn allocate(&self, count: usize) -> Buffer {
        self.make_current();
        let mut address = 0;
        // SAFETY: writes to a local variable.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&raw mut address, count * 4)
        });
        Buffer(address)
    }

    pub(crate) fn free(&self, buffer: Buffer) {
        self.make_current();
        // SAFETY: an address is a number; the driver checks that it allocated it.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(buffer.0) });
    }

    /// `count` floats from the device's default pool, in the order of `stream`.
    pub(crate) fn allocate_on(&self, count: usize, stream: Stream) -> Buffer {
        self.make_current();
        let mut address = 0;
        // SAFETY: writes to a local variable; the stream is live.
        check("cuMemAllocAsync", unsafe {
            sys::cuMemAllocAsync(&raw mut address, count * 4, stream.0)
        });
        Buffer(address)
    }

    pub(crate) fn free_on(&self, buffer: Buffer, stream: Stream) {
        self.make_current();
        // SAFETY: an address is a number; the driver checks that it allocated it. The stream is
        // live.
        check("cuMemFreeAsync", unsafe {
            sys::cuMemFreeAsync(buffer.0, stream.0)
        });
    }

    pub(crate) fn pinned(&self, count: usize) -> Pinned {
        self.make_current();
        let mut pointer = std::ptr::null_mut();
        // SAFETY: writes to a local variable.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&raw mut pointer, count * 4, 0)
        });
        Pinned {
            pointer: pointer.cast(),
            count,
        }
    }

    pub(crate) fn upload(&self, to: Buffer, from: &Pinned, stream: Stream) {
        self.make_current();
        // SAFETY: pinned memory is never freed, so it lives until the copy has read it.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.0, from.pointer.cast(), from.count * 4, stream.0)
        };
        check("cuMemcpyHtoDAsync", result);
    }

    /// The synchronous copy, from pageable memory.
    pub(crate) fn upload_now(&self, to: Buffer, from: &[f32]) {
        self.make_current();
        // SAFETY: reads the values; the byte count is theirs.
        let result = unsafe { sys::cuMemcpyHtoD_v2(to.0, from.as_ptr().cast(), size_of_val(from)) };
        check("cuMemcpyHtoD", result);
    }

    pub(crate) fn synchronize_device(&self) {
        self.make_current();
        // SAFETY: takes no pointer.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() });
    }

    pub(crate) fn download(&self, to: &Pinned, from: Buffer, stream: Stream) {
        self.make_current();
        // SAFETY: pinned memory is never freed and all reads are volatile, so it may change at any
        // time.
        let result =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.pointer.cast(), from.0, to.count * 4, stream.0) };
        check("cuMemcpyDtoHAsync", result);
    }

    pub(crate) fn copy(&self, to: Buffer, from: Buffer, count: usize, stream: Stream) {
        self.make_current();
        // SAFETY: device addresses, and a live stream.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to.0, from.0, count * 4, stream.0)
        });
    }

    pub(crate) fn fill(&self, buffer: Buffer, value: f32, count: usize, stream: Stream) {
        self.make_current();
        // SAFETY: a device address, and a live stream.
        check("cuMemsetD32Async", unsafe {
            sys::cuMemsetD32Async(buffer.0, value.to_bits(), count, stream.0)
        });
    }

    /// Asserts that `buffer` holds `count` times `value` after the work of `stream`. The numbers
    /// are checked after everything else has run, so that a mistake is reported by its cause first.
    pub(crate) fn expect(&self, value: f32, buffer: Buffer, count: usize, stream: Stream) {
        let host = self.pinned(count);
        self.download(&host, buffer, stream);
        self.synchronize(stream);
        self.synchronize_device();
        for index in 0..count {
            assert_eq!(host.get(index), value, "element {index} of {count}");
        }
    }

    /// Adds one to each of `count` floats, in blocks of 256 threads.
    pub(crate) fn add_one(&self, buffer: Buffer, count: usize, stream: Stream) {
        self.run(0, buffer, count, (count as u32).div_ceil(256), stream);
    }

    /// The largest of `count` floats becomes the first.
    pub(crate) fn largest(&self, buffer: Buffer, count: usize, stream: Stream) {
        self.run(1, buffer, count, 1, stream);
    }

    /// A race after `rounds` rounds, if their number is odd.
    pub(crate) fn late(&self, buffer: Buffer, rounds: usize, stream: Stream) {
        self.run(2, buffer, rounds, 1, stream);
    }

    /// `out` becomes `x` and one, which the compiler may read through the read-only cache, or must.
    pub(crate) fn add_one_to(&self, out: Buffer, x: Buffer, by_ldg: bool, stream: Stream) {
        self.make_current();
        let kernel = 3 + usize::from(by_ldg);
        self.start(kernel, &[out.0, x.0], 1, stream);
    }

    /// Adds one to the float `at` floats after the beginning of the buffer.
    pub(crate) fn add_one_at(&self, buffer: Buffer, at: usize, stream: Stream) {
        self.run(5, buffer, at, 1, stream);
    }

    /// Calls `function` with `argument` when the stream comes to it.
    pub(crate) fn call(
        &self,
        function: extern "C" fn(*mut c_void),
        argument: &'static Pinned,
        stream: Stream,
    ) {
        self.make_current();
        let argument = std::ptr::from_ref(argument).cast_mut().cast();
        // SAFETY: the function takes a Pinned, which lives as long as the process.
        check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(stream.0, Some(function), argument)
        });
    }

    pub(crate) fn add_one_in_current_context(&self, buffer: Buffer, count: usize, stream: Stream) {
        let blocks = (count as u32).div_ceil(256);
        self.start(0, &[buffer.0, count as u64], blocks, stream);
    }

    fn run(&self, kernel: usize, buffer: Buffer, count: usize, blocks: u32, stream: Stream) {
        self.make_current();
        self.start(kernel, &[buffer.0, count as u64], blocks, stream);
    }

    fn start(&self, kernel: usize, values: &[u64; 2], blocks: u32, stream: Stream) {
        let function = self.find(kernel);
        let mut arguments = values
            .each_ref()
            .map(|value| std::ptr::from_ref(value).cast_mut().cast::<c_void>());
        let null = std::ptr::null_mut();
        // SAFETY: each kernel takes two pointers, or one and an unsigned long long: 64 bits each.
        // The call copies them.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                256,
                1,
                1,
                0,
                stream.0,
                arguments.as_mut_ptr(),
                null,
            )
        };
        check("cuLaunchKernel", result);
    }

    /// Compiles and loads the kernels, which is not allowed during a capture.
    pub(crate) fn prepare_kernels(&self) {
        self.load_module();
        self.find(0);
    }

    /// Only the module: its kernels are loaded when they are looked up.
    pub(crate) fn load_module(&self) {
        self.make_current();
        self.kernels.get_or_init(compile);
    }

    fn find(&self, kernel: usize) -> sys::CUfunction {
        let module = *self.kernels.get_or_init(compile);
        *self.functions[kernel].get_or_init(|| {
            let name = NAMES[kernel];
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is never unloaded; the name ends with a zero.
            check("cuModuleGetFunction", unsafe {
                sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr())
            });
            function
        })
    }

    pub(crate) fn begin_capture(&self, stream: Stream) {
        self.make_current();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.0, mode)
        });
    }

    pub(crate) fn end_capture(&self, stream: Stream) -> Graph {
        self.make_current();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both calls write to local variables; the second uses the graph of the first.
        unsafe {
            check(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(stream.0, &raw mut graph),
            );
            check(
                "cuGraphInstantiate",
                sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0),
            );
        }
        Graph(executable)
    }

    pub(crate) fn launch(&self, graph: Graph, stream: Stream) {
        self.make_current();
        // SAFETY: both handles are live.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(graph.0, stream.0)
        });
    }

    /// Whether this device can access the memory of `other`.
    pub(crate) fn can_reach(&self, other: &Gpu) -> bool {
        let mut can = 0;
        // SAFETY: writes to a local variable.
        let result = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.device, other.device) };
        check("cuDeviceCanAccessPeer", result);
        can != 0
    }

    /// Gives this device access to the default pool of `other`.
    pub(crate) fn open_pool_of(&self, other: &Gpu) {
        let mut pool = std::ptr::null_mut();
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.device,
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the first call writes to a local variable; the second reads one description,
        // which exists.
        unsafe {
            check(
                "cuDeviceGetDefaultMemPool",
                sys::cuDeviceGetDefaultMemPool(&raw mut pool, other.device),
            );
            check(
                "cuMemPoolSetAccess",
                sys::cuMemPoolSetAccess(pool, &raw const access, 1),
            );
        }
    }
}

const NAMES: [&CStr; 6] = [
    c"add_one",
    c"largest",
    c"late",
    c"add_one_to",
    c"add_one_by_ldg",
    c"add_one_at",
];

const SOURCE: &CStr = cr#"
extern "C" __global__ void add_one(float* values, unsigned long long count) {
    unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) values[at] += 1.0f;
}
extern "C" __global__ void largest(float* values, unsigned long long count) {
    if (threadIdx.x > 0) return;
    float all = 0.0f;
    for (unsigned long long i = 0; i < count; i++) all = fmaxf(all, values[i]);
    values[0] = all;
}
extern "C" __global__ void late(float* values, unsigned long long rounds) {
    volatile float* own = values + threadIdx.x;
    for (unsigned long long i = 0; i < rounds; i++) *own = *own + 1.0f;
    __syncthreads();
    values[rounds % 2 == 1 ? 0 : threadIdx.x] = 0.0f;
}
extern "C" __global__ void add_one_to(float* out, const float* __restrict__ x) {
    out[threadIdx.x] = x[threadIdx.x] + 1.0f;
}
extern "C" __global__ void add_one_by_ldg(float* out, const float* x) {
    out[threadIdx.x] = __ldg(x + threadIdx.x) + 1.0f;
}
extern "C" __global__ void add_one_at(float* values, unsigned long long at) {
    if (threadIdx.x == 0) values[at] += 1.0f;
}
"#;

/// Compiles the kernels for the current context's device, and loads their module.
fn compile() -> sys::CUmodule {
    let cubin = compile_to_cubin();
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is a whole CUBIN, which the call copies.
    check("cuModuleLoadData", unsafe {
        sys::cuModuleLoadData(&raw mut module, cubin.as_ptr().cast())
    });
    module
}

fn compile_to_cubin() -> Vec<u8> {
    let check = |call, result| assert_eq!(result, nvrtc::nvrtcResult::NVRTC_SUCCESS, "{call}");
    let architecture =
        std::ffi::CString::new(format!("--gpu-architecture=sm_{}", compute_capability()))
            .expect("no zero");
    let options = [architecture.as_ptr()];
    let (mut program, none) = (std::ptr::null_mut(), std::ptr::null());
    // SAFETY: texts end with a zero and outlive the calls; there are no headers and one option; the
    // program is written to a local variable.
    let compiled = unsafe {
        let name = c"planted.cu".as_ptr();
        check(
            "nvrtcCreateProgram",
            nvrtc::nvrtcCreateProgram(&raw mut program, SOURCE.as_ptr(), name, 0, none, none),
        );
        nvrtc::nvrtcCompileProgram(program, 1, options.as_ptr())
    };
    let mut bytes = 0;
    if compiled != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        // SAFETY: writes to a local variable.
        check("nvrtcGetProgramLogSize", unsafe {
            nvrtc::nvrtcGetProgramLogSize(program, &raw mut bytes)
        });
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has as many bytes as the library asked for.
        check("nvrtcGetProgramLog", unsafe {
            nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast())
        });
        panic!(
            "nvrtcCompileProgram: {compiled:?}: {}",
            String::from_utf8_lossy(&log)
        );
    }
    // SAFETY: writes to a local variable.
    check("nvrtcGetCUBINSize", unsafe {
        nvrtc::nvrtcGetCUBINSize(program, &raw mut bytes)
    });
    let mut cubin = vec![0u8; bytes];
    // SAFETY: the buffer has as many bytes as the library asked for.
    check("nvrtcGetCUBIN", unsafe {
        nvrtc::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast())
    });
    cubin
}

/// The compute capability of the current context's device: 90 for 9.0.
fn compute_capability() -> i32 {
    let (mut device, mut major, mut minor) = (0, 0, 0);
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    // SAFETY: each call writes to a local variable.
    unsafe {
        check("cuCtxGetDevice", sys::cuCtxGetDevice(&raw mut device));
        check(
            "cuDeviceGetAttribute",
            sys::cuDeviceGetAttribute(&raw mut major, MAJOR, device),
        );
        check(
            "cuDeviceGetAttribute",
            sys::cuDeviceGetAttribute(&raw mut minor, MINOR, device),
        );
    }
    major * 10 + minor
}

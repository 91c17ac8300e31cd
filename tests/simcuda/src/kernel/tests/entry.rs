//! From source to a launch on a stream, through the entry points.

use std::ffi::{CString, c_char, c_void};
use std::mem::MaybeUninit;

use cudarc::driver::sys::{CUfunction_attribute as Attribute, CUstream};
use cudarc::nvrtc::sys::nvrtcResult as Status;

use crate::copy::{cuMemcpyDtoH_v2, cuMemcpyHtoD_v2};
use crate::error::CUresult;
use crate::kernel::*;
use crate::memory::calls::{cuMemAlloc_v2, cuMemFree_v2, cuMemHostAlloc};
use crate::nvrtc::*;
use crate::report::FindingKind;
use crate::stream::calls::{cuCtxSynchronize, cuStreamSynchronize};
use crate::stream::tests::{Bench, SUCCESS, bench, config, got};

const SOURCE: &str = r#"
extern "C" __global__ void add(float* x, float by, int first, int step, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[first + step * i] += by;
}
extern "C" __global__ void large(float* x) {
  extern __shared__ float room[];
  room[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) few() {}
"#;

fn nvrtc_got<T>(call: impl FnOnce(Out<'_, T>) -> Status) -> T {
    let mut value = MaybeUninit::uninit();
    assert_eq!(call(Some(&mut value)), Status::NVRTC_SUCCESS);
    // SAFETY: entry points that succeed have written what they give back.
    unsafe { value.assume_init() }
}

/// A program that is not compiled yet.
fn program(source: &str) -> usize {
    let source = CString::new(source).unwrap();
    // SAFETY: the texts end with zeros, and there are no headers.
    nvrtc_got(|to| unsafe {
        nvrtcCreateProgram(
            to,
            source.as_ptr(),
            c"entry.cu".as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    })
}

fn compile_program(program: usize, options: &[&str]) -> Status {
    let options: Vec<CString> = options
        .iter()
        .map(|option| CString::new(*option).unwrap())
        .collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: as many texts as are said.
    unsafe { nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr()) }
}

fn log_of(program: usize) -> String {
    let mut log = vec![0_u8; nvrtc_got(|size| nvrtcGetProgramLogSize(program, size))];
    // SAFETY: `log` has the size that nvrtcGetProgramLogSize gave for this program.
    let status = unsafe { nvrtcGetProgramLog(program, log.as_mut_ptr().cast()) };
    assert_eq!(status, Status::NVRTC_SUCCESS);
    assert_eq!(log.pop(), Some(0));
    String::from_utf8(log).unwrap()
}

fn cubin(source: &str) -> Vec<u8> {
    let mut program = program(source);
    let status = compile_program(
        program,
        &["--gpu-architecture=sm_90", "--fmad=false", "--std=c++17"],
    );
    assert_eq!(status, Status::NVRTC_SUCCESS, "{}", log_of(program));
    let mut image = vec![0_u8; nvrtc_got(|size| nvrtcGetCUBINSize(program, size))];
    // SAFETY: room for as many bytes as were asked for; the handle is a place of ours.
    unsafe {
        assert_eq!(
            nvrtcGetCUBIN(program, image.as_mut_ptr().cast()),
            Status::NVRTC_SUCCESS
        );
        assert_eq!(nvrtcDestroyProgram(&mut program), Status::NVRTC_SUCCESS);
    }
    image
}

fn module(image: &[u8]) -> usize {
    // SAFETY: a whole image.
    got(|module| unsafe { cuModuleLoadData(module, image.as_ptr().cast()) })
}

fn function(module: usize, name: &str) -> Result<usize, CUresult> {
    let (mut place, name) = (MaybeUninit::uninit(), CString::new(name).unwrap());
    // SAFETY: the name is a text.
    match unsafe { cuModuleGetFunction(Some(&mut place), module, name.as_ptr()) } {
        // SAFETY: written by the call that succeeded.
        SUCCESS => Ok(unsafe { place.assume_init() }),
        error => Err(error),
    }
}

/// A launch in one dimension whose arguments lie in the low bytes of numbers.
fn launch(
    function: usize,
    grid: u32,
    block: u32,
    shared: u32,
    stream: CUstream,
    arguments: &[u64],
) -> CUresult {
    let pointers: Vec<*const c_void> = arguments
        .iter()
        .map(|argument| (&raw const *argument).cast())
        .collect();
    // SAFETY: tests give as many arguments as the kernel has, none of more than 8 bytes.
    unsafe {
        cuLaunchKernel(
            function,
            grid,
            1,
            1,
            block,
            1,
            1,
            shared,
            stream,
            pointers.as_ptr(),
            std::ptr::null(),
        )
    }
}

fn upload(values: &[f32]) -> u64 {
    let address = got(|pointer| cuMemAlloc_v2(pointer, size_of_val(values)));
    // SAFETY: `values` and the allocation at `address` both have `size_of_val(values)` bytes.
    let status = unsafe { cuMemcpyHtoD_v2(address, values.as_ptr().cast(), size_of_val(values)) };
    assert_eq!(status, SUCCESS);
    // The values were read, but may still be in flight: other streams are not ordered after that.
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    address
}

fn download(address: u64, count: usize) -> Vec<f32> {
    let mut values = vec![0_f32; count];
    // SAFETY: `values` has room for `count` floats of 4 bytes.
    let status = unsafe { cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), address, count * 4) };
    assert_eq!(status, SUCCESS);
    values
}

fn setup(seed: u64) -> (Bench, usize) {
    let bench = bench(config(seed));
    bench.set_device(0);
    (bench, module(&cubin(SOURCE)))
}

fn bits(value: f32) -> u64 {
    value.to_bits().into()
}

#[test]
fn a_kernel_runs_from_source_to_values() {
    let (bench, module) = setup(1);
    let (add, stream) = (function(module, "add").unwrap(), bench.stream());
    let x = upload(&[0.0; 1000]);
    let mut arguments = [x, bits(2.5), 0, 1, 1000];
    assert_eq!(launch(add, 4, 256, 0, stream, &arguments), SUCCESS);
    // The arguments were copied at the call, and queued launches keep the code.
    arguments.fill(u64::MAX);
    assert_eq!(cuModuleUnload(module), SUCCESS);
    assert_eq!(
        launch(add, 4, 256, 0, stream, &arguments),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(download(x, 1000), [2.5; 1000]);
    assert_eq!(bench.finding_kinds(), []);
}

/// A launch gives pointers other addresses, which a program must not notice.
#[test]
fn pointers_can_be_compared_and_stored() {
    const SOURCE: &str = r#"
    struct Node { Node* next; float value; };
    extern "C" __global__ void total(const float* __restrict__ at, const float* end, float* sum) {
        for (; at < end; at++) *sum += *at;
    }
    extern "C" __global__ void link(Node* nodes, Node** first) {
        for (int i = 0; i < 3; i++) nodes[i] = Node{i < 2 ? nodes + i + 1 : nullptr, 1.0f};
        *first = nodes;
    }
    extern "C" __global__ void walk(float* sum, Node* nodes, Node** first) {
        *sum += *first == nodes ? 10.0f : 0.0f;
        for (Node* node = *first; node != nullptr; node = node->next) *sum += node->value;
    }"#;
    let bench = bench(config(1));
    bench.set_device(0);
    let (module, stream) = (module(&cubin(SOURCE)), bench.stream());
    let run = |name, arguments: &[u64]| {
        let function = function(module, name).unwrap();
        assert_eq!(launch(function, 1, 1, 0, stream, arguments), SUCCESS);
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    };
    let (x, nodes, first) = (upload(&[1.0; 100]), upload(&[0.0; 12]), upload(&[0.0; 2]));
    let sum = upload(&[0.0]);
    run("total", &[x, x + 400, sum]);
    run("link", &[nodes, first]);
    run("walk", &[sum, nodes, first]);
    assert_eq!(download(sum, 1), [113.0]);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn interleaved_elements_do_not_race_and_common_ones_do() {
    for seed in 0..6 {
        let (bench, module) = setup(seed);
        let add = function(module, "add").unwrap();
        let x = upload(&[0.0; 512]);
        let (first, second) = (bench.stream(), bench.stream());
        assert_eq!(
            launch(add, 1, 256, 0, first, &[x, bits(1.0), 0, 2, 256]),
            SUCCESS
        );
        assert_eq!(
            launch(add, 1, 256, 0, second, &[x, bits(1.0), 1, 2, 256]),
            SUCCESS
        );
        assert_eq!(
            (cuStreamSynchronize(first), cuStreamSynchronize(second)),
            (SUCCESS, SUCCESS)
        );
        assert_eq!(bench.finding_kinds(), [], "seed {seed}");
        assert_eq!(download(x, 512), [1.0; 512]);
        assert_eq!(
            launch(add, 1, 256, 0, first, &[x, bits(1.0), 0, 2, 256]),
            SUCCESS
        );
        assert_eq!(
            launch(add, 1, 1, 0, second, &[x, bits(1.0), 100, 1, 1]),
            SUCCESS
        );
        assert_eq!(
            (cuStreamSynchronize(first), cuStreamSynchronize(second)),
            (SUCCESS, SUCCESS)
        );
        assert_eq!(bench.finding_kinds(), [FindingKind::Race], "seed {seed}");
        let message = bench.findings()[0].message.clone();
        assert!(
            message.contains("kernel add<<<1, 256>>>") && message.contains("kernel add<<<1, 1>>>"),
            "{message}"
        );
    }
}

#[test]
fn an_illegal_address_loses_the_device() {
    let (bench, module) = setup(1);
    let (add, stream) = (function(module, "add").unwrap(), bench.stream());
    let x = upload(&[0.0; 100]);
    assert_eq!(
        launch(add, 1, 128, 0, stream, &[x, bits(1.0), 0, 1, 101]),
        SUCCESS
    );
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(cuStreamSynchronize(stream), illegal);
    assert_eq!(launch(add, 1, 1, 0, stream, &[x, 0, 0, 1, 1]), illegal);
    assert_eq!(bench.finding_kinds(), [FindingKind::OutOfBounds]);
    let message = bench.findings()[0].message.clone();
    for part in [
        "kernel add<<<1, 128>>>",
        "read 4 bytes",
        "thread (100, 0, 0)",
        "entry.cu:4",
        "past the end",
    ] {
        assert!(message.contains(part), "no {part:?} in {message}");
    }
}

#[test]
fn memory_that_was_freed_is_not_touched() {
    let (bench, module) = setup(1);
    let (add, stream) = (function(module, "add").unwrap(), bench.stream());
    let x = upload(&[0.0; 100]);
    assert_eq!(cuMemFree_v2(x), SUCCESS);
    assert_eq!(
        launch(add, 1, 1, 0, stream, &[x, bits(1.0), 0, 1, 1]),
        SUCCESS
    );
    assert_eq!(
        cuStreamSynchronize(stream),
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
    );
    assert_eq!(bench.finding_kinds(), [FindingKind::UseAfterFree]);
}

#[test]
fn pinned_memory_is_reached_at_its_own_address() {
    let (bench, module) = setup(1);
    let (add, stream) = (function(module, "add").unwrap(), bench.stream());
    let pinned = got(|pointer| cuMemHostAlloc(pointer, 400, 0)).cast::<f32>();
    // SAFETY: 100 floats were just allocated.
    unsafe { std::slice::from_raw_parts_mut(pinned, 100).fill(1.0) };
    assert_eq!(
        launch(
            add,
            1,
            100,
            0,
            stream,
            &[pinned as u64, bits(1.0), 0, 1, 100]
        ),
        SUCCESS
    );
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    // SAFETY: as above; the kernel that writes them is done.
    let values = unsafe { std::slice::from_raw_parts(pinned, 100) };
    assert_eq!(values, [2.0; 100]);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn shapes_and_shared_memory_have_cudas_limits() {
    let (bench, module) = setup(1);
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let (add, large, few) = (
        function(module, "add").unwrap(),
        function(module, "large").unwrap(),
        function(module, "few").unwrap(),
    );
    let stream = bench.stream();
    assert_eq!(
        function(module, "none"),
        Err(CUresult::CUDA_ERROR_NOT_FOUND)
    );
    assert_eq!(
        function(module, "add"),
        Ok(add),
        "the same function has the same handle"
    );
    for (grid, block) in [(0, 1), (1, 0), (1, 1025), (1 << 31, 1)] {
        assert_eq!(
            launch(add, grid, block, 0, stream, &[0; 5]),
            invalid,
            "{grid} x {block}"
        );
    }
    assert_eq!(
        launch(few, 1, 65, 0, stream, &[]),
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    );
    let attribute = |function, attribute: Attribute| {
        got(|value| cuFuncGetAttribute(value, attribute as u32, function))
    };
    assert_eq!(
        attribute(few, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        64
    );
    assert_eq!(
        attribute(add, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
        0
    );
    let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(attribute(large, dynamic), 48 << 10);

    let values: Vec<f32> = (0..256).map(|value| value as f32).collect();
    let x = upload(&values);
    let bytes = 227 << 10;
    assert_eq!(
        launch(large, 1, 256, bytes, stream, &[x]),
        invalid,
        "more than 48 KiB are to be asked for"
    );
    assert_eq!(
        cuFuncSetAttribute(large, dynamic as u32, bytes as i32 + 1),
        invalid
    );
    assert_eq!(
        cuFuncSetAttribute(large, dynamic as u32, bytes as i32),
        SUCCESS
    );
    assert_eq!(launch(large, 1, 256, bytes, stream, &[x]), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(
        download(x, 256),
        values.into_iter().rev().collect::<Vec<_>>()
    );
    let blocks = |threads, shared| {
        got(|count| cuOccupancyMaxActiveBlocksPerMultiprocessor(count, large, threads, shared))
    };
    assert_eq!(
        (
            blocks(256, 0),
            blocks(1024, 0),
            blocks(32, 0),
            blocks(256, 100 << 10)
        ),
        (8, 2, 32, 2)
    );
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn a_function_belongs_to_its_device() {
    let (bench, module) = setup(1);
    let add = function(module, "add").unwrap();
    bench.set_device(1);
    let stream = bench.stream();
    assert_eq!(
        launch(add, 1, 1, 0, stream, &[0; 5]),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
}

#[test]
fn images_must_fit_the_device() {
    let _bench = bench(config(1));
    let load = |options: &[&str], as_text: bool| {
        let program = program(SOURCE);
        assert_eq!(
            compile_program(program, options),
            Status::NVRTC_SUCCESS,
            "{}",
            log_of(program)
        );
        let size = nvrtc_got(|size| {
            if as_text {
                nvrtcGetPTXSize(program, size)
            } else {
                nvrtcGetCUBINSize(program, size)
            }
        });
        let mut image = vec![0_u8; size];
        let mut module = MaybeUninit::uninit();
        // SAFETY: room for as many bytes as were asked for, which make a whole image.
        unsafe {
            let to = image.as_mut_ptr().cast();
            let status = if as_text {
                nvrtcGetPTX(program, to)
            } else {
                nvrtcGetCUBIN(program, to)
            };
            assert_eq!(status, Status::NVRTC_SUCCESS);
            cuModuleLoadData(Some(&mut module), image.as_ptr().cast())
        }
    };
    let none = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU;
    assert_eq!(load(&["--gpu-architecture=sm_90"], false), SUCCESS);
    assert_eq!(
        load(&["--gpu-architecture=sm_80"], false),
        none,
        "code of another major version"
    );
    assert_eq!(load(&["--gpu-architecture=sm_100"], false), none);
    assert_eq!(
        load(&["--gpu-architecture=compute_80"], true),
        SUCCESS,
        "text is compiled for the device"
    );
    assert_eq!(load(&["--gpu-architecture=compute_100"], true), none);
    let mut module = MaybeUninit::uninit();
    // SAFETY: a text with a zero.
    let status = unsafe { cuModuleLoadData(Some(&mut module), c"not an image".as_ptr().cast()) };
    assert_eq!(status, CUresult::CUDA_ERROR_INVALID_IMAGE);
}

#[test]
fn a_program_that_does_not_compile_has_a_log() {
    let _bench = bench(config(1));
    let wrong = program("extern \"C\" __global__ void k(int* x) {\n  *x = nothing;\n}\n");
    assert_eq!(compile_program(wrong, &[]), Status::NVRTC_ERROR_COMPILATION);
    assert!(log_of(wrong).contains("entry.cu(2)"), "{}", log_of(wrong));
    assert_eq!(
        nvrtcGetCUBINSize(wrong, Some(&mut MaybeUninit::uninit())),
        Status::NVRTC_ERROR_INVALID_PROGRAM
    );
    assert_eq!(
        compile_program(program(""), &["--never-heard-of"]),
        Status::NVRTC_ERROR_INVALID_OPTION
    );
    assert_eq!(
        compile_program(0x1230, &[]),
        Status::NVRTC_ERROR_INVALID_PROGRAM
    );
    let named = program("template <int N> __global__ void t(int* x) { *x = N; }\n");
    // SAFETY: the expression is a C string.
    let status = unsafe { nvrtcAddNameExpression(named, c"t<3>".as_ptr()) };
    assert_eq!(status, Status::NVRTC_SUCCESS);
    assert_eq!(
        compile_program(named, &[]),
        Status::NVRTC_SUCCESS,
        "{}",
        log_of(named)
    );
    // SAFETY: as above.
    let lowered = nvrtc_got(|name| unsafe { nvrtcGetLoweredName(named, c"t<3>".as_ptr(), name) });
    assert!(!lowered.is_null());
}

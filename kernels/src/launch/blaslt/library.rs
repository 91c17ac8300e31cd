//! The functions of cuBLASLt, its errors, and what it does to sums before it stores them.

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t};

use crate::cuda::gpu::Handle;
use crate::device::discover;
use crate::error::Help;
use crate::library::{self, Library};

/// Opaque to us: handles, descriptors, layouts and preferences.
pub(super) type Opaque = *mut c_void;

library::functions! {
    /// cuBLASLt's functions that we call. Enums are plain numbers: a newer library may have more
    /// values.
    struct BlasFunctions {
        fn cublasLtCreate(*mut Opaque) -> c_int;
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusName(c_int) -> *const c_char;
        fn cublasLtGetStatusString(c_int) -> *const c_char;
        fn cublasLtMatmulDescCreate(*mut Opaque, u32, u32) -> c_int;
        fn cublasLtMatmulDescSetAttribute(Opaque, u32, *const c_void, usize) -> c_int;
        fn cublasLtMatmulDescDestroy(Opaque) -> c_int;
        fn cublasLtMatrixLayoutCreate(*mut Opaque, u32, u64, u64, i64) -> c_int;
        fn cublasLtMatrixLayoutSetAttribute(Opaque, u32, *const c_void, usize) -> c_int;
        fn cublasLtMatrixLayoutDestroy(Opaque) -> c_int;
        fn cublasLtMatmulPreferenceCreate(*mut Opaque) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(Opaque, u32, *const c_void, usize) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(Opaque) -> c_int;
        fn cublasLtMatmulAlgoGetHeuristic(
            Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque,
            c_int, *mut Heuristic, *mut c_int
        ) -> c_int;
        fn cublasLtMatmul(
            Opaque, Opaque, *const c_void, *const c_void, Opaque, *const c_void, Opaque, *const c_void,
            *const c_void, Opaque, *mut c_void, Opaque, *const cublasLtMatmulAlgo_t, *mut c_void, usize, Opaque
        ) -> c_int;
    }
}

/// The library, with its handle for one device.
pub(super) struct Blas {
    pub(super) functions: BlasFunctions,
    pub(super) handle: Handle<Opaque>,
}

/// A `cublasLtMatmulHeuristicResult_t`, whose status is a number here.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Heuristic {
    pub(super) algorithm: cublasLtMatmulAlgo_t,
    pub(super) workspace_bytes: usize,
    pub(super) status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Heuristic {
    pub(super) const NONE: Heuristic = Heuristic {
        algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
        workspace_bytes: 0,
        status: 0,
        waves: 0.0,
        reserved: [0; 4],
    };

    /// Whether it can be used with this much workspace.
    pub(super) fn fits(&self, workspace_bytes_max: usize) -> bool {
        self.status == 0 && self.workspace_bytes <= workspace_bytes_max
    }
}
const _: () = assert!(size_of::<Heuristic>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());

/// An error of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlasFault {
    pub(super) function: &'static str,
    pub(super) code: c_int,
}

/// No algorithm supports the matmul.
pub(super) const NOT_SUPPORTED: c_int = 15;

/// Calls a function and turns its code into a result. Used in an unsafe block with a SAFETY comment
/// for the call.
macro_rules! blaslt {
    ($functions:expr, $name:ident ( $($argument:expr),* $(,)? )) => {
        $crate::launch::blaslt::library::outcome(stringify!($name), ($functions.$name)($($argument),*))
    };
}
pub(super) use blaslt;

pub(super) fn outcome(function: &'static str, code: c_int) -> Result<(), BlasFault> {
    if code == 0 {
        Ok(())
    } else {
        Err(BlasFault { function, code })
    }
}

/// The first library in which a handle can be created for the current context. An error says what
/// is missing, with help.
pub(super) fn load() -> Result<Blas, String> {
    const HELP: &str = "install cuBLASLt of CUDA 12.0 or later, for example the pip wheel \
         nvidia-cublas in the active Python environment";
    let names = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
    Library::first(&discover().cublaslt, &names, |library| {
        let functions = BlasFunctions::load(library, HELP)?;
        // SAFETY: takes no arguments and needs no context.
        let version = unsafe { (functions.cublasLtGetVersion)() };
        let refused = |why| format!("cuBLASLt {version} is {why}{}", Help(HELP));
        discover()
            .refuse_cuda(version as u64 / 10_000)
            .map_err(refused)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the caller's context is current; the pointer is to a local variable.
        let made = unsafe { blaslt!(functions, cublasLtCreate(&mut handle)) };
        made.map_err(|BlasFault { function, code }| {
            let (name, meaning) = functions.describe(code);
            let help = "check that the device has free memory and that the library fits the driver";
            format!("{function} failed: {name} ({meaning}){}", Help(help))
        })?;
        let handle = Handle(handle);
        Ok(Blas { functions, handle })
    })
}

impl BlasFunctions {
    /// The library's name and text for a code.
    pub(super) fn describe(&self, code: c_int) -> (String, String) {
        let text = |ask: unsafe extern "C" fn(c_int) -> *const c_char| {
            // SAFETY: both functions take any code and return null or a static C string.
            let text = unsafe { ask(code) };
            if text.is_null() {
                return None;
            }
            // SAFETY: not null, so a C string that lives as long as the library, which stays
            // loaded.
            let text = unsafe { CStr::from_ptr(text) };
            Some(text.to_string_lossy().into_owned())
        };
        let name = text(self.cublasLtGetStatusName).unwrap_or_else(|| format!("error {code}"));
        (name, text(self.cublasLtGetStatusString).unwrap_or_default())
    }
}

/// What cuBLASLt does to the sums.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Epilogue {
    pub(crate) function: MatmulFunction,
    /// One element per column, added first.
    pub(crate) bias: Option<u64>,
    /// `Gelu` also stores its input here; `GeluGradient` reads it.
    pub(crate) aux: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MatmulFunction {
    #[default]
    Identity,
    Relu,
    /// The library's approximation of the tanh form, off by up to 2e-4.
    Gelu,
    /// Multiplies by the derivative of the tanh form at `aux`.
    GeluGradient,
}

// The library's numbers: CUBLASLT_EPILOGUE_RELU and so on are sums of these.
pub(super) const NOTHING: u32 = 1;
pub(super) const RELU: u32 = 2;
pub(super) const BIAS: u32 = 4;
pub(super) const GELU: u32 = 32;
pub(super) const GELU_GRADIENT: u32 = 64;
pub(super) const HAS_AUX: u32 = 128;

impl Epilogue {
    /// Whether the library accepts a bias or an aux matrix at this address.
    pub(crate) fn fits(address: u64) -> bool {
        address.is_multiple_of(16)
    }

    pub(super) fn number(&self) -> u32 {
        let function = match self.function {
            MatmulFunction::Identity => 0,
            MatmulFunction::Relu => RELU,
            MatmulFunction::Gelu => GELU,
            MatmulFunction::GeluGradient => GELU_GRADIENT,
        };
        let bias = if self.bias.is_some() { BIAS } else { 0 };
        let aux = if self.aux.is_some() { HAS_AUX } else { 0 };
        match function | bias | aux {
            0 => NOTHING,
            number => number,
        }
    }
}

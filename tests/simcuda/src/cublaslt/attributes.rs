//! Descriptors, set attribute by attribute, with the sizes and defaults of the cuBLASLt
//! documentation (cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t,
//! cublasLtMatmulPreferenceAttributes_t).

/// A field of a descriptor, as bytes of its documented size.
pub(super) enum Field<'a> {
    U32(&'a mut u32),
    I32(&'a mut i32),
    U64(&'a mut u64),
    I64(&'a mut i64),
    F32(&'a mut f32),
}

impl Field<'_> {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::U32(_) | Self::I32(_) | Self::F32(_) => 4,
            Self::U64(_) | Self::I64(_) => 8,
        }
    }

    /// `from` is as long as `bytes` says.
    pub(super) fn set(&mut self, from: &[u8]) {
        let mut four = [0; 4];
        let mut eight = [0; 8];
        if from.len() == 4 {
            four.copy_from_slice(from)
        } else {
            eight.copy_from_slice(from)
        }
        match self {
            Self::U32(value) => **value = u32::from_ne_bytes(four),
            Self::I32(value) => **value = i32::from_ne_bytes(four),
            Self::F32(value) => **value = f32::from_ne_bytes(four),
            Self::U64(value) => **value = u64::from_ne_bytes(eight),
            Self::I64(value) => **value = i64::from_ne_bytes(eight),
        }
    }

    pub(super) fn get(&self) -> Vec<u8> {
        match self {
            Self::U32(value) => value.to_ne_bytes().to_vec(),
            Self::I32(value) => value.to_ne_bytes().to_vec(),
            Self::F32(value) => value.to_ne_bytes().to_vec(),
            Self::U64(value) => value.to_ne_bytes().to_vec(),
            Self::I64(value) => value.to_ne_bytes().to_vec(),
        }
    }
}

/// A struct whose fields are numbered by attribute.
pub(super) trait Attributes {
    /// The field of `attribute`; None if it is not modelled.
    fn field(&mut self, attribute: u32) -> Option<Field<'_>>;
}

/// `cublasLtMatmulDesc_t`. Raw values are checked on use, as the library does.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) compute: u32,
    pub(super) scale: u32,
    pub(super) pointer_mode: u32,
    pub(super) transpose: [u32; 3],
    pub(super) fill_mode: i32,
    pub(super) epilogue: u32,
    pub(super) bias: u64,
    pub(super) bias_batch_stride: i64,
    /// -1: that of D.
    pub(super) bias_type: i32,
    pub(super) aux: u64,
    pub(super) aux_ld: i64,
    pub(super) aux_batch_stride: i64,
    /// -1: that of D.
    pub(super) aux_type: i32,
    pub(super) multiprocessors: i32,
}

impl Operation {
    pub(super) fn new(compute: u32, scale: u32) -> Self {
        Self {
            compute,
            scale,
            pointer_mode: 0,
            transpose: [0; 3],
            fill_mode: 2,
            epilogue: 1,
            bias: 0,
            bias_batch_stride: 0,
            bias_type: -1,
            aux: 0,
            aux_ld: 0,
            aux_batch_stride: 0,
            aux_type: -1,
            multiprocessors: 0,
        }
    }
}

impl Attributes for Operation {
    fn field(&mut self, attribute: u32) -> Option<Field<'_>> {
        Some(match attribute {
            0 => Field::U32(&mut self.compute),
            1 => Field::U32(&mut self.scale),
            2 => Field::U32(&mut self.pointer_mode),
            3 => Field::U32(&mut self.transpose[0]),
            4 => Field::U32(&mut self.transpose[1]),
            5 => Field::U32(&mut self.transpose[2]),
            6 => Field::I32(&mut self.fill_mode),
            7 => Field::U32(&mut self.epilogue),
            8 => Field::U64(&mut self.bias),
            10 => Field::I64(&mut self.bias_batch_stride),
            11 => Field::U64(&mut self.aux),
            12 => Field::I64(&mut self.aux_ld),
            13 => Field::I64(&mut self.aux_batch_stride),
            15 => Field::I32(&mut self.multiprocessors),
            22 => Field::I32(&mut self.aux_type),
            26 => Field::I32(&mut self.bias_type),
            _ => return None,
        })
    }
}

/// `cublasLtMatrixLayout_t`.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) kind: u32,
    /// 0: columns are contiguous, 1: rows are.
    pub(super) order: u32,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// In elements, from one column (or row) to the next.
    pub(super) ld: i64,
    pub(super) batch: i32,
    /// In elements, from one matrix of the batch to the next.
    pub(super) batch_stride: i64,
}

impl Layout {
    pub(super) fn new(kind: u32, rows: u64, columns: u64, ld: i64) -> Self {
        Self {
            kind,
            order: 0,
            rows,
            columns,
            ld,
            batch: 1,
            batch_stride: 0,
        }
    }
}

impl Attributes for Layout {
    fn field(&mut self, attribute: u32) -> Option<Field<'_>> {
        Some(match attribute {
            0 => Field::U32(&mut self.kind),
            1 => Field::U32(&mut self.order),
            2 => Field::U64(&mut self.rows),
            3 => Field::U64(&mut self.columns),
            4 => Field::I64(&mut self.ld),
            5 => Field::I32(&mut self.batch),
            6 => Field::I64(&mut self.batch_stride),
            _ => return None,
        })
    }
}

/// `cublasLtMatmulPreference_t`.
#[derive(Clone, Debug)]
pub(super) struct Preference {
    pub(super) search_mode: u32,
    pub(super) workspace_bytes_max: u64,
    pub(super) reduction_schemes: u32,
    /// Of A, B, C, D, in bytes.
    pub(super) alignments: [u32; 4],
    pub(super) waves_max: f32,
    pub(super) implementations: u64,
}

impl Default for Preference {
    fn default() -> Self {
        Self {
            search_mode: 0,
            workspace_bytes_max: 0,
            reduction_schemes: 7,
            alignments: [256; 4],
            waves_max: 0.0,
            implementations: u64::MAX,
        }
    }
}

impl Attributes for Preference {
    fn field(&mut self, attribute: u32) -> Option<Field<'_>> {
        Some(match attribute {
            0 => Field::U32(&mut self.search_mode),
            1 => Field::U64(&mut self.workspace_bytes_max),
            3 => Field::U32(&mut self.reduction_schemes),
            5..=8 => Field::U32(&mut self.alignments[attribute as usize - 5]),
            9 => Field::F32(&mut self.waves_max),
            12 => Field::U64(&mut self.implementations),
            _ => return None,
        })
    }
}

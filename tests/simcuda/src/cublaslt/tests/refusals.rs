//! What the library lacks, and what contradicts itself.

use super::*;

#[test]
fn what_the_library_lacks_is_unsupported_and_what_contradicts_itself_is_invalid() {
    let dense = layouts([F32, F32], 5, 4, 3, [0, 0]);
    let unsupported = |operation: &Operation, layouts: &[Layout; 4]| {
        matches!(problem_of(operation, layouts), Err(Refusal::Unsupported(_)))
    };
    let invalid = |operation: &Operation, layouts: &[Layout; 4]| {
        matches!(problem_of(operation, layouts), Err(Refusal::Invalid(_)))
    };
    assert!(
        unsupported(
            &operation(256, [1, 0]),
            &layouts([F32, F32], 5, 4, 3, [1, 0])
        ),
        "BGRADA with op(A) = T"
    );
    assert!(
        unsupported(&operation(512, [0, 0]), &dense),
        "BGRADB with op(B) = N"
    );
    assert!(
        unsupported(
            &Operation {
                bias_type: 14,
                ..operation(4, [0, 0])
            },
            &dense
        ),
        "a bf16 bias for an f32 D"
    );
    assert!(
        unsupported(&operation(1, [0, 0]), &layouts([1, 1], 5, 4, 3, [0, 0])),
        "f64 with COMPUTE_32F"
    );
    assert!(unsupported(
        &Operation {
            compute: 77,
            ..operation(1, [0, 0])
        },
        &layouts([BF16, F32], 5, 4, 3, [0, 0])
    ));
    let double = Operation {
        compute: 70,
        scale: 1,
        ..operation(4, [0, 0])
    };
    assert!(
        unsupported(&double, &layouts([1, 1], 5, 4, 3, [0, 0])),
        "an epilogue with COMPUTE_64F"
    );
    assert!(
        invalid(&operation(1, [0, 0]), &layouts([F32, F32], 5, 4, 0, [0, 0])),
        "a dimension of zero"
    );
    assert!(
        invalid(
            &Operation {
                aux_ld: 64,
                ..operation(130, [0, 0])
            },
            &dense
        ),
        "a mask whose ld is not a multiple of 128"
    );
    assert!(
        invalid(
            &Operation {
                aux_ld: 12,
                ..operation(160, [0, 0])
            },
            &dense
        ),
        "an aux whose ld is not a multiple of 8"
    );
    assert!(
        invalid(&operation(3, [0, 0]), &dense),
        "an epilogue that there is not"
    );
    let mut wrong = dense.clone();
    wrong[1].rows = 2;
    assert!(
        invalid(&operation(1, [0, 0]), &wrong),
        "shapes that do not fit"
    );
    wrong = dense;
    wrong[0].ld = 4;
    assert!(
        invalid(&operation(1, [0, 0]), &wrong),
        "columns that overlap"
    );
}

#[test]
fn an_algorithm_holds_for_one_shape_and_one_epilogue() {
    let of = |epilogue, m| {
        problem_of(
            &operation(epilogue, [0, 0]),
            &layouts([F32, F32], m, 4, 3, [0, 0]),
        )
        .unwrap()
    };
    let algorithm = Algorithm::from_raw(&Algorithm::new(&of(1, 5), 0, [256; 4]).raw()).unwrap();
    assert!(fits(&of(1, 5), algorithm).is_ok());
    assert!(fits(&of(1, 100), algorithm).is_err());
    assert!(fits(&of(4, 5), algorithm).is_err());
    assert!(Algorithm::from_raw(&cublasLtMatmulAlgo_t { data: [0; 8] }).is_err());
    let misaligned = Matmul {
        a: A + 4,
        ..matmul(of(1, 5), 1.0, 0.0)
    };
    assert!(check_pointers(&misaligned, algorithm).is_err());
    assert!(check_pointers(&misaligned, Algorithm::new(&of(1, 5), 0, [4; 4])).is_ok());
}

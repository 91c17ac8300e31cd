use super::*;
use crate::Random;
use proptest::prelude::*;

fn counting(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::arange(count, DType::I64, Device::Cpu)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

proptest! {
    #[test]
    fn slices_and_reshapes_show_the_elements_they_name(
        rows in 0usize..9, columns in 0usize..9, start in 0usize..10, end in 0usize..10
    ) {
        let whole = counting(&[rows, columns]);
        match whole.slice(start..end) {
            Ok(part) => {
                prop_assert!(start <= end && end <= rows);
                let expected: Vec<i64> = (start * columns..end * columns).map(|i| i as i64).collect();
                prop_assert_eq!(part.to_vec::<i64>().unwrap(), expected.clone());
                prop_assert_eq!(part.flatten().unwrap().to_vec::<i64>().unwrap(), expected);
                prop_assert_eq!(part.shares_memory_with(&whole), part.count() > 0);
            }
            Err(error) => {
                prop_assert!(start > end || end > rows);
                prop_assert!(error.to_string().contains("slice: range: expected within 0.."), "{}", error);
            }
        }
    }

    #[test]
    fn a_transposed_view_has_the_transposes_elements(rows in 0usize..40, columns in 0usize..40) {
        let whole = counting(&[rows, columns]);
        let turned = whole.t().unwrap();
        prop_assert_eq!(turned.shape().dims(), &[columns, rows][..]);
        let expected: Vec<i64> =
            (0..columns).flat_map(|c| (0..rows).map(move |r| (r * columns + c) as i64)).collect();
        prop_assert_eq!(turned.to_vec::<i64>().unwrap(), expected.clone());
        prop_assert_eq!(turned.contiguous().unwrap().to_vec::<i64>().unwrap(), expected);
        prop_assert_eq!(turned.t().unwrap().to_vec::<i64>().unwrap(), whole.to_vec::<i64>().unwrap());
        prop_assert!(turned.t().unwrap().reshape(&[rows * columns]).is_ok());
    }

    #[test]
    fn reshape_takes_exactly_the_shapes_of_as_many_elements(shape in prop::collection::vec(0usize..6, 0..5)) {
        let whole = counting(&[24]);
        let fits = shape.iter().product::<usize>() == 24;
        prop_assert_eq!(whole.reshape(&shape).is_ok(), fits);
    }
}

#[test]
fn index_and_slice_of_what_is_not_there_are_errors_that_name_it() {
    let x = counting(&[2, 3]).named("x");
    let error = x.index(2).unwrap_err().to_string();
    assert!(
        error.contains("expected below 2 for \"x\" i64[2, 3] on cpu, got 2"),
        "{error}"
    );
    assert!(counting(&[]).index(0).is_err() && counting(&[]).slice(0..0).is_err());
    assert!(x.slice(usize::MAX..usize::MAX).is_err());
    let error = x.t().unwrap().flatten().unwrap_err().to_string();
    assert!(
        error.contains("got a transposed view") && error.contains(".contiguous()"),
        "{error}"
    );
    assert_eq!(x.index(1).unwrap().to_vec::<i64>().unwrap(), [3, 4, 5]);
}

#[test]
fn shape_dtype_and_device_are_shown_together_and_never_the_contents() {
    let x = Tensor::zeros(&[2, 3], DType::BF16, Device::Cpu).unwrap();
    assert_eq!(
        format!("{x} | {x:?}"),
        "bf16[2, 3] on cpu | Tensor(bf16[2, 3] on cpu)"
    );
    assert_eq!(x.named("h").to_string(), "\"h\" bf16[2, 3] on cpu");
}

#[test]
fn constructors_inherit_and_refuse_what_a_dtype_cannot_hold() {
    let x = Tensor::ones(&[2], DType::BF16, Device::Cpu).unwrap();
    let mut random = Random::new(1);
    for like in [x.zeros_like(), x.ones_like()] {
        let like = like.unwrap();
        assert_eq!(
            (like.dtype(), like.shape(), like.device()),
            (DType::BF16, x.shape(), x.device())
        );
    }
    assert_eq!(
        x.new_full(&[3, 1], 2.0)
            .unwrap()
            .to_vec::<half::bf16>()
            .unwrap(),
        [half::bf16::from_f32(2.0); 3]
    );
    for bad in [
        Tensor::full(&[1], 300.0, DType::U8, Device::Cpu),
        Tensor::full(&[1], 0.5, DType::I32, Device::Cpu),
        Tensor::full(&[1], f64::NAN, DType::I64, Device::Cpu),
        Tensor::arange(257, DType::U8, Device::Cpu),
        Tensor::rand(&[1], DType::I32, Device::Cpu, &mut random),
        Tensor::randint(0, &[1], DType::I32, Device::Cpu, &mut random),
        Tensor::randint(257, &[1], DType::U8, Device::Cpu, &mut random),
        Tensor::randint(2, &[1], DType::F32, Device::Cpu, &mut random),
    ] {
        let text = bad.unwrap_err().to_string();
        assert!(
            text.contains("expected") && text.contains("tensor/tests.rs"),
            "{text}"
        );
    }
    assert_eq!(
        Tensor::arange(256, DType::U8, Device::Cpu)
            .unwrap()
            .to_vec::<u8>()
            .unwrap()[255],
        255
    );
}

#[test]
fn reading_as_another_type_or_a_number_from_many_is_refused() {
    let x = counting(&[4]);
    let error = x.to_vec::<f32>().unwrap_err().to_string();
    assert!(
        error.contains("expected dtype f32") && error.contains(".to_dtype(DType::F32)"),
        "{error}"
    );
    let error = x.item().unwrap_err().to_string();
    assert!(
        error.contains("item: x i64[4] on cpu: expected exactly one element"),
        "{error}"
    );
    let target = Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
    assert!(
        target
            .copy_from(&x)
            .unwrap_err()
            .to_string()
            .contains("expected the target's dtype, f32")
    );
    assert!(
        x.copy_from(&x)
            .unwrap_err()
            .to_string()
            .contains("share memory")
    );
}

#[test]
fn naming_a_part_keeps_the_whole_name_and_empty_parts_work() {
    let arena = Tensor::zeros(&[10], DType::F32, Device::Cpu)
        .unwrap()
        .named("arena.all");
    let head = arena.slice(0..2).unwrap().named("arena.head");
    assert_eq!(head.name(), Some("arena.head"));
    let live = crate::memory::largest_live(Device::Cpu, usize::MAX);
    let is_called = |wanted: &str| {
        let mut names = live.iter().filter_map(|live| live.tensor.name.as_deref());
        names.any(|name| name == wanted)
    };
    assert!(is_called("arena.all") && !is_called("arena.head"));
    let empty = arena.slice(3..3).unwrap();
    assert!(!empty.shares_memory_with(&arena));
    arena
        .with_slice_mut::<f32, _>(|_| assert!(empty.to_vec::<f32>().unwrap().is_empty()))
        .unwrap();
}

#[test]
fn bits_are_seen_as_another_dtype_where_whole_elements_of_it_are() {
    let bytes = Tensor::zeros(&[24], DType::U8, Device::Cpu).unwrap();
    let floats = bytes.slice(8..16).unwrap().bits_as(DType::F32).unwrap();
    floats.with_slice_mut(|x: &mut [f32]| x[1] = 1.0).unwrap();
    let wide = bytes.bits_as(DType::I64).unwrap();
    let expected = [0, i64::from(1f32.to_bits()) << 32, 0];
    assert_eq!(wide.to_vec::<i64>().unwrap(), expected);
    for part in [1..5, 4..12, 0..7] {
        let error = bytes.slice(part).unwrap().bits_as(DType::I64).unwrap_err();
        assert!(
            error.to_string().contains("whole elements of i64"),
            "{error}"
        );
    }
    let matrix = Tensor::zeros(&[2, 4], DType::F32, Device::Cpu).unwrap();
    assert!(matrix.t().unwrap().bits_as(DType::U8).is_err());
    assert_eq!(matrix.bits_as(DType::U8).unwrap().count(), 32);
}

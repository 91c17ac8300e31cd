//! Losses and gradients that are not finite stop all parts.

use super::*;

/// A batch made by hand, all rows this rank's.
fn batch(step0: u64, x: &[f32], targets: &[f32], devices: &[Device]) -> Result<Batch> {
    let rows = x.len() / FEATURES;
    let x = Tensor::from_slice(x, &[rows, FEATURES], devices[0])?;
    let targets = Tensor::from_slice(targets, &[rows, OUTPUTS], devices[devices.len() - 1])?;
    Ok(Batch::new(step0, 0, rows as u64, 0, x, targets, 2))
}

#[test]
fn a_bad_loss_leaves_all_parts_as_they_were_and_its_row_is_found() {
    let Some(_turn) = turn() else { return };
    let alone = places().into_iter().filter(|place| place.ranks == 1);
    let recipes = [Recipe::regression(), Recipe::regression().tied()];
    for (place, recipe) in alone.flat_map(|place| recipes.clone().map(|it| (place.clone(), it))) {
        let devices = &place.devices[0];
        let found = on_ranks(1, None, |world| {
            let mut step = recipe.step(devices, world)?;
            let mut x: Vec<f32> = (0..5 * FEATURES as u64).map(|at| uniform(1, at)).collect();
            let targets = [0.5; 5 * OUTPUTS];
            step.run(&batch(0, &x, &targets, devices)?, RATE)?;
            assert_eq!(step.report()?.bad_step, None);
            let before = (values(&step)?, moments(&step)?);
            x[3 * FEATURES] = f32::INFINITY;
            let bad = batch(1, &x, &targets, devices)?;
            step.run(&bad, RATE)?;
            x[3 * FEATURES] = 0.0;
            step.measure_norm(true);
            step.run(&batch(2, &x, &targets, devices)?, RATE)?;
            let report = step.report()?;
            assert_eq!(
                [report.bad_step, report.own_bad_step],
                [Some(2); 2],
                "{devices:?}"
            );
            assert!(
                (values(&step)?, moments(&step)?) == before,
                "{devices:?}: something changed"
            );
            step.losses_of(&bad)
        });
        let bad: Vec<usize> = (0..5).filter(|&row| !found[0][row].is_finite()).collect();
        assert_eq!(bad, [3], "{devices:?}: {found:?}");
    }
}

#[test]
fn a_gradient_that_overflows_on_the_first_device_stops_all_of_them() {
    let Some(_turn) = turn() else { return };
    for place in places().into_iter().filter(|place| place.ranks == 1) {
        let devices = &place.devices[0];
        on_ranks(1, None, |world| {
            let mut step = Recipe::regression().step(devices, world)?;
            let params = &step.stages()[0].model().params;
            let weight = params.value(params.find("0.weight")?.id);
            weight.copy_from(&weight.zeros_like()?)?;
            // The weight is zero, so the loss is finite, but its gradient is not; the norm is not
            // measured.
            let bad = batch(0, &[3e38; 4 * FEATURES], &[1e6; 4 * OUTPUTS], devices)?;
            let before = values(&step)?;
            step.run(&bad, RATE)?;
            let report = step.report()?;
            assert!(report.stats.loss().is_finite(), "{report:?}");
            assert_eq!(
                [report.bad_step, report.own_bad_step],
                [Some(1), None],
                "{devices:?}"
            );
            assert!(values(&step)? == before, "{devices:?}: something changed");
            Ok(())
        });
    }
}

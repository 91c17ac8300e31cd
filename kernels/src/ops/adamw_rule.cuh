// AdamW on one element: see update.rs.
{
    let keep = select(of.decays, of.scalars[0], number(1.0));
    let step_size = of.scalars[1];
    let second_correction = of.scalars[2];
    let first_weight = of.constants[0];
    let beta2 = of.constants[1];
    let second_weight = of.constants[2];
    let epsilon = of.constants[3];
    first = fused(first_weight, grad - first, first);
    second = fused(second_weight * grad, grad, beta2 * second);
    let denominator = fused(root(second), second_correction, epsilon);
    value = value * keep - step_size * first / denominator;
}
